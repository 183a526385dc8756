#include "base/parallel.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <windows.h>
#else
#include <dlfcn.h>
#if defined(__APPLE__)
#include <mach-o/dyld.h>
#else
#include <link.h>
#endif
#endif

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/forks.h"

namespace tilewise {
namespace {

// GNU's way to start a team.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// The way of LLVM's and Intel's runtimes. The first argument of each call is a place in the source.
struct Place {
  std::int32_t reserved_1 = 0, flags = 2, reserved_2 = 0, reserved_3 = 0;  // 2: a compiler made the call
  const char* text = ";unknown;unknown;0;0;;";
};
using KmpcMember = void (*)(std::int32_t* thread, std::int32_t* place_in_team, ...);
using KmpcFork = void (*)(Place*, std::int32_t arguments, KmpcMember, ...);
using KmpcNumber = std::int32_t (*)(Place*);
using KmpcCount = void (*)(Place*, std::int32_t thread, std::int32_t threads);

struct Runtime {
  GompParallel parallel = nullptr;
  KmpcFork fork = nullptr;
  KmpcNumber number = nullptr;
  KmpcCount count = nullptr;
  std::string path;  // empty: there is none
};

#if defined(_WIN32)
using Library = HMODULE;
// The names that Intel and Visual Studio give to theirs.
Library find_library(std::string& path) {
  for (const char* name : {"libiomp5md.dll", "libomp140.x86_64.dll", "libomp140.aarch64.dll", "libomp.dll"}) {
    const Library library = GetModuleHandleA(name);
    char found[MAX_PATH];
    if (library == nullptr || GetModuleFileNameA(library, found, sizeof found) == 0) continue;
    path = found;
    return library;
  }
  return nullptr;
}
template <class Function>
bool find(Library library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(reinterpret_cast<void*>(GetProcAddress(library, name)));
  return to != nullptr;
}
#else
bool is_openmp(const char* path) {
  if (path == nullptr) return false;
  const char* base = std::strrchr(path, '/');
  base = base == nullptr ? path : base + 1;
  return std::strncmp(base, "libgomp", 7) == 0 || std::strncmp(base, "libomp", 6) == 0 ||
         std::strncmp(base, "libiomp", 7) == 0;
}

using Library = void*;
Library find_library(std::string& path) {
#if defined(__APPLE__)
  for (std::uint32_t i = 0; i < _dyld_image_count() && path.empty(); i++)
    if (is_openmp(_dyld_get_image_name(i))) path = _dyld_get_image_name(i);
#else
  const auto visit = [](dl_phdr_info* info, std::size_t, void* data) {
    if (!is_openmp(info->dlpi_name)) return 0;
    *static_cast<std::string*>(data) = info->dlpi_name;
    return 1;
  };
  dl_iterate_phdr(visit, &path);
#endif
  return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
}
template <class Function>
bool find(Library library, const char* name, Function& to) {
  void* symbol = dlsym(library, name);
  std::memcpy(&to, &symbol, sizeof symbol);
  return symbol != nullptr;
}
#endif

// A library that links no runtime cannot bring a second one into the process. GNU's has only its own entry; LLVM's and
// Intel's have theirs on every system, and GNU's beside it on some.
Runtime find_runtime() {
  Runtime runtime;
  std::string path;
  const Library library = find_library(path);
  if (library == nullptr) return runtime;
  const bool kmpc = find(library, "__kmpc_fork_call", runtime.fork) &&
                    find(library, "__kmpc_global_thread_num", runtime.number) &&
                    find(library, "__kmpc_push_num_threads", runtime.count);
  if (!kmpc) runtime.fork = nullptr;
  if (kmpc || find(library, "GOMP_parallel", runtime.parallel)) runtime.path = path;
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
  ~Buffer() { release(data); }
};
thread_local Buffer buffer;

// Whether this thread had a team. A fork copies the flag with the thread, and leaves the team behind.
thread_local bool had_team = false;

// What each thread of LLVM's team calls, with the two arguments of the fork.
void join(std::int32_t*, std::int32_t*, void (*body)(void*), void* context) { body(context); }

}  // namespace

void run_team(int threads, void (*body)(void*), void* context) {
  if (threads <= 1 || runtime().path.empty()) {
    body(context);
    return;
  }
  had_team = true;
  if (runtime().fork == nullptr) {
    runtime().parallel(body, context, static_cast<unsigned>(threads), 0);
    return;
  }
  static Place place;
  runtime().count(&place, runtime().number(&place), threads);
  runtime().fork(&place, 2, reinterpret_cast<KmpcMember>(reinterpret_cast<void*>(join)), body, context);
}

const void* this_thread() { return &buffer; }

void* allocate(std::size_t alignment, std::size_t bytes) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, alignment);
#else
  return std::aligned_alloc(alignment, bytes);
#endif
}

void release(void* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

bool fork_loses_team() {
  // GNU's runtime waits for threads that are not in the child; LLVM's and Intel's make new ones.
  return had_team && runtime().path.find("/libgomp") != std::string::npos;
}

const char* openmp_runtime() { return runtime().path.c_str(); }

void* scratch(std::size_t bytes) {
  if (buffer.size < bytes) {
    release(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = allocate(4096, buffer.size);
    if (buffer.data == nullptr) buffer.size = 0;
  }
  return buffer.data;
}

void trim_scratch() {
  if (buffer.size <= kKept) return;
  release(buffer.data);
  buffer.data = nullptr;
  buffer.size = 0;
}

}  // namespace tilewise
