// Advice to the operating system about large outputs.
#include <cstdlib>

#include "ops.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace normwise {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
static bool wants_huge_pages() {
  static const char* const asked = std::getenv("NORMWISE_HUGE_PAGES");
  return !(asked && asked[0] == '0');
}

Tensor advised(const Tensor& fresh) {
  constexpr uintptr_t PAGE = 2 << 20, LEAST = 4 << 20;
  const uintptr_t bytes = fresh.numel() * fresh.element_size();
  if (bytes < LEAST || !wants_huge_pages()) return fresh;
  const uintptr_t start = (uintptr_t)fresh.mutable_data_ptr();
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE, last = (start + bytes) / PAGE * PAGE;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
  return fresh;
}
#else
Tensor advised(const Tensor& fresh) { return fresh; }
#endif

}  // namespace normwise
