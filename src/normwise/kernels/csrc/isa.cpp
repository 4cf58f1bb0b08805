// Chooses at run time which instruction set is used.
#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace normwise {

static Isa choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("NORMWISE_ISA");  // to compare them, or to rule better ones out
  const auto allows = [asked](const char* name) { return asked && std::strcmp(asked, name) == 0; };
  const Isa most = allows("baseline") ? Isa::baseline
                   : allows("avx2")   ? Isa::avx2
                   : allows("avx512") ? Isa::avx512
                                      : Isa::avx512bf16;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const Isa best = bf16 ? Isa::avx512bf16 : avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::baseline;
  return best < most ? best : most;
#else
  return Isa::baseline;
#endif
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace normwise

extern "C" __attribute__((visibility("default"))) const char* normwise_instructions() {
  static const char* const names[] = {"baseline", "avx2", "avx512", "avx512bf16"};
  return names[(int)normwise::isa()];
}
