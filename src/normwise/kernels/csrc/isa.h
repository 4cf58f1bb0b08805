// The instruction sets that kernels are compiled for, and the choice between them at run time.
//
// setup.py compiles each kernels_*.cpp once for each of them, with NW_ISA and NW_BYTES defined; such a file defines
// one function NW_NAMED(x) that returns its table, and an ops_*.cpp says NW_CHOOSE(Type, x) to get x(). Of AVX-512
// with its instructions for bfloat16 only the files bf16_*.cpp are compiled, and NW_CHOOSE_BF16 gets what they have.
#pragma once

namespace normwise {

enum class Isa { baseline, avx2, avx512, avx512bf16 };
Isa isa();  // the best that this processor has, or what the environment variable NORMWISE_ISA allows

#define NW_JOIN_(A, B) A##_##B
#define NW_JOIN(A, B) NW_JOIN_(A, B)
#define NW_NAMED(NAME) NW_JOIN(NAME, NW_ISA)

#if defined(__x86_64__)
#define NW_DECLARE(TYPE, NAME) \
  TYPE NAME##_baseline();      \
  TYPE NAME##_avx2();          \
  TYPE NAME##_avx512();
#define NW_BEST(NAME) \
  isa() >= Isa::avx512 ? NAME##_avx512() : isa() == Isa::avx2 ? NAME##_avx2() : NAME##_baseline()
#define NW_DECLARE_BF16(TYPE, NAME) \
  NW_DECLARE(TYPE, NAME)            \
  TYPE NAME##_avx512bf16();
#define NW_BEST_BF16(NAME) isa() == Isa::avx512bf16 ? NAME##_avx512bf16() : NW_BEST(NAME)
#else  // arm64 compiles, untested: no such machine was at hand
#define NW_DECLARE(TYPE, NAME) TYPE NAME##_baseline();
#define NW_BEST(NAME) NAME##_baseline()
#define NW_DECLARE_BF16 NW_DECLARE
#define NW_BEST_BF16 NW_BEST
#endif

#define NW_CHOOSE_(TYPE, NAME, DECLARE, BEST) \
  DECLARE(TYPE, NAME)                         \
  const TYPE& NAME() {                        \
    static const TYPE chosen = BEST(NAME);    \
    return chosen;                            \
  }
#define NW_CHOOSE(TYPE, NAME) NW_CHOOSE_(TYPE, NAME, NW_DECLARE, NW_BEST)
#define NW_CHOOSE_BF16(TYPE, NAME) NW_CHOOSE_(TYPE, NAME, NW_DECLARE_BF16, NW_BEST_BF16)

}  // namespace normwise
