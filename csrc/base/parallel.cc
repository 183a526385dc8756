#include "base/parallel.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/forks.h"

namespace tilewise {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Runtime {
  GompParallel parallel = nullptr;
  std::string path;
};

int visit_library(dl_phdr_info* info, std::size_t, void* data) {
  const char* name = info->dlpi_name;
  if (name == nullptr) return 0;
  const char* base = std::strrchr(name, '/');
  base = base == nullptr ? name : base + 1;
  const bool openmp = std::strncmp(base, "libgomp", 7) == 0 || std::strncmp(base, "libomp", 6) == 0 ||
                      std::strncmp(base, "libiomp", 7) == 0;
  if (!openmp) return 0;
  *static_cast<std::string*>(data) = name;
  return 1;
}

// Every OpenMP runtime on Linux (GNU, LLVM, Intel) exports GOMP_parallel, so one call serves them all, and
// a library that links none cannot bring a second one into the process.
Runtime find_runtime() {
  Runtime runtime;
  std::string path;
  dl_iterate_phdr(visit_library, &path);
  if (path.empty()) return runtime;
  void* handle = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) return runtime;
  void* symbol = dlsym(handle, "GOMP_parallel");
  if (symbol == nullptr) return runtime;
  std::memcpy(&runtime.parallel, &symbol, sizeof symbol);
  runtime.path = path;
  return runtime;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

constexpr std::size_t kKept = std::size_t{8} << 20;

struct Buffer {
  void* data = nullptr;
  std::size_t size = 0;
  ~Buffer() { std::free(data); }
};
thread_local Buffer buffer;

// Whether this thread had a team. A fork copies the flag with the thread, and leaves the team behind.
thread_local bool had_team = false;

}  // namespace

void run_team(int threads, void (*body)(void*), void* context) {
  if (threads <= 1 || runtime().parallel == nullptr) {
    body(context);
  } else {
    had_team = true;
    runtime().parallel(body, context, static_cast<unsigned>(threads), 0);
  }
}

bool fork_loses_team() {
  // GNU's runtime waits for threads that are not in the child; LLVM's and Intel's make new ones.
  return had_team && runtime().path.find("/libgomp") != std::string::npos;
}

const char* openmp_runtime() { return runtime().path.c_str(); }

void* scratch(std::size_t bytes) {
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.size);
    if (buffer.data == nullptr) buffer.size = 0;
  }
  return buffer.data;
}

void trim_scratch() {
  if (buffer.size <= kKept) return;
  std::free(buffer.data);
  buffer.data = nullptr;
  buffer.size = 0;
}

}  // namespace tilewise
