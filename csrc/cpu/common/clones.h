// A function marked SPAMM_CPU_CLONES is compiled for AVX-512, for AVX2 and for the baseline. The
// loader picks the version for the machine. The compiler must be able to vectorise its loops. The
// functions that it calls must be SPAMM_INLINE, or they are compiled for the baseline only. The
// loader asks before ThreadSanitizer is ready, which then crashes: that build has the baseline.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define SPAMM_CPU_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPAMM_CPU_CLONES
#endif
#define SPAMM_INLINE [[gnu::always_inline]] inline
