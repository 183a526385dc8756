// Counts what was expected and prints what was not.
#pragma once

#include <cstdio>
#include <string>

#include "guarded.h"

namespace tilewise::test {

struct Report {
  int failures = 0;  // of the test that runs
  double worst = 0;  // largest error of the test that runs, as a share of what is allowed
  std::string worst_case;
};
inline Report report;

inline std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

inline void fail(const std::string& what) {
  if (++report.failures <= 5) std::printf("    %s\n", what.c_str());
}
inline void expect(bool holds, const std::string& what) {
  if (!holds) fail(what);
}
inline void expect(bool holds, const char* what) {
  if (!holds) fail(what);
}

}  // namespace tilewise::test
