// The instruction sets that kernels are compiled for, and the choice between them at run time.
//
// setup.py compiles each kernels_*.cpp once for each of them, with NW_ISA and NW_BYTES defined; such a file defines
// one function NW_NAMED(x) that returns its table, and an ops_*.cpp says NW_CHOOSE(Type, x) to get x().
#pragma once

namespace normwise {

enum class Isa { baseline, avx2, avx512 };
Isa isa();  // the best that this processor has, or what the environment variable NORMWISE_ISA allows

#define NW_JOIN_(A, B) A##_##B
#define NW_JOIN(A, B) NW_JOIN_(A, B)
#define NW_NAMED(NAME) NW_JOIN(NAME, NW_ISA)

#if defined(__x86_64__)
#define NW_CHOOSE(TYPE, NAME)                                        \
  TYPE NAME##_baseline();                                            \
  TYPE NAME##_avx2();                                                \
  TYPE NAME##_avx512();                                              \
  const TYPE& NAME() {                                               \
    static const TYPE chosen = isa() == Isa::avx512 ? NAME##_avx512() \
                               : isa() == Isa::avx2 ? NAME##_avx2()   \
                                                    : NAME##_baseline(); \
    return chosen;                                                   \
  }
#else  // arm64 compiles, untested: no such machine was at hand
#define NW_CHOOSE(TYPE, NAME)                       \
  TYPE NAME##_baseline();                           \
  const TYPE& NAME() {                              \
    static const TYPE chosen = NAME##_baseline();   \
    return chosen;                                  \
  }
#endif

}  // namespace normwise
