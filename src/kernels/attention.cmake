# CPU attention: one template, compiled once per instruction set; attention_cpu.cpp picks at run time. Only these
# files get wider instructions, so nothing they define may be linked into code for smaller machines: their
# headers keep everything in an anonymous namespace, and -O3 in every build type leaves no inline function of
# another header behind as a shared copy.
lm_library(lm_attention SOURCES attention_cpu.cpp attention_baseline.cpp attention_avx2.cpp attention_avx512.cpp
           attention_avx512_bf16.cpp attention_amx_bf16.cpp attention_chunk_sizes.cpp DEPENDS lm_base)
# Attention is not one of the kernels whose every operation is fixed: a * b + c may become fma.
set_source_files_properties(attention_baseline.cpp PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=fast")
set_source_files_properties(attention_avx2.cpp PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=fast;-mavx2;-mfma")
set_source_files_properties(attention_avx512.cpp PROPERTIES COMPILE_OPTIONS
  "-O3;-ffp-contract=fast;-mavx2;-mfma;-mavx512f;-mprefer-vector-width=512")
# gcc 12 warns of its own undefined-vector idiom inside immintrin.h.
set(bf16 "-O3;-ffp-contract=fast;-mavx2;-mfma;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mprefer-vector-width=512;-Wno-maybe-uninitialized")
set_source_files_properties(attention_avx512_bf16.cpp PROPERTIES COMPILE_OPTIONS "${bf16}")
set_source_files_properties(attention_amx_bf16.cpp PROPERTIES COMPILE_OPTIONS "${bf16};-mamx-tile;-mamx-bf16")
