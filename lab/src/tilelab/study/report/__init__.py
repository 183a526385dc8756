"""The report: a page and its Markdown twin, made from a study's config and records alone."""

from tilelab.study.report.files import write

__all__ = ["write"]
