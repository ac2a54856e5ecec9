add_executable(attention_benchmark attention.cpp)
target_link_libraries(attention_benchmark PRIVATE lm_attention lm_base lm_device_cpu torch::cpu)
