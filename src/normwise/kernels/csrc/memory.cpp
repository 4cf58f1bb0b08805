// Large outputs: advice to the operating system, and whether they are written past the cache.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include "ops.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace normwise {

// More than 64 MiB at once the system may have to move other memory for, which was measured to cost more than it
// saves. Such an output comes in 4 KiB pages, each of them cleared, and so in the cache, just before it is written:
// writing past the cache would then cost, too.
constexpr uintptr_t MOST = 64 << 20;

#if defined(__linux__) && defined(MADV_HUGEPAGE)
static bool wants_huge_pages() {
  static const char* const asked = std::getenv("NORMWISE_HUGE_PAGES");
  return !(asked && asked[0] == '0');
}

Tensor advised(const Tensor& fresh) {
  constexpr uintptr_t PAGE = 2 << 20, LEAST = 4 << 20;
  const uintptr_t bytes = fresh.numel() * fresh.element_size();
  if (bytes < LEAST || bytes > MOST || !wants_huge_pages()) return fresh;
  const uintptr_t start = (uintptr_t)fresh.mutable_data_ptr();
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE, last = (start + bytes) / PAGE * PAGE;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
  return fresh;
}
#else
Tensor advised(const Tensor& fresh) { return fresh; }
#endif

// The last cache that a core shares with others. The C library is not asked: on AMD's processors in a virtual machine
// it was seen to say ten times as much.
static int64_t cache_bytes() {
  constexpr int64_t USUAL = 32 << 20;  // where the system does not say: what a server of today has at least
#if defined(__linux__)
  int64_t kib = 0;
  for (int level = 4; level >= 2 && kib == 0; --level) {
    char path[64];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", level);
    if (std::FILE* file = std::fopen(path, "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kib) != 1) kib = 0;
      std::fclose(file);
    }
  }
  if (kib > 0) return kib << 10;
#endif
  return USUAL;
}

bool streams(const Tensor& out, int64_t bytes_read, int64_t row_bytes) {
  static const int64_t cache = cache_bytes();
  const int64_t bytes = out.numel() * (int64_t)out.element_size();
  return bytes + bytes_read >= cache && bytes <= (int64_t)MOST && row_bytes % 64 == 0 &&
         (uintptr_t)out.mutable_data_ptr() % 64 == 0;
}

}  // namespace normwise
