// Threads and scratch memory. The OpenMP runtime is the one that torch has already loaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilewise {

// Runs body(context) on up to `threads` threads, the caller among them, and waits for all.
void run_team(int threads, void (*body)(void*), void* context);

// Path of the OpenMP runtime in use, or "" when none is mapped (then a team is one thread).
const char* openmp_runtime();

// A value that differs from thread to thread while they run.
const void* this_thread();

// Memory of at least `bytes`, a multiple of `alignment`; null when memory ran out. release() takes it back.
void* allocate(std::size_t alignment, std::size_t bytes);
void release(void* memory);

// A 4 KiB-aligned buffer of this thread, kept between calls while it is small; null when memory ran out.
void* scratch(std::size_t bytes);

// Gives a large scratch buffer of this thread back.
void trim_scratch();

}  // namespace tilewise
