// Chooses at run time which instruction set is used.
#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace normwise {

static Isa choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("NORMWISE_ISA");  // to compare them, or to rule one out
  const bool not_512 = asked && std::strcmp(asked, "avx2") == 0;
  const bool no_avx = asked && std::strcmp(asked, "baseline") == 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && !not_512 && !no_avx) return Isa::avx512;
  if (avx2 && !no_avx) return Isa::avx2;
#endif
  return Isa::baseline;
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace normwise

extern "C" __attribute__((visibility("default"))) const char* normwise_instructions() {
  using normwise::Isa;
  return normwise::isa() == Isa::avx512 ? "avx512" : normwise::isa() == Isa::avx2 ? "avx2" : "baseline";
}
