lm_test(attention_test SOURCES attention_test.cpp attention_caps_test.cpp DEPENDS lm_attention lm_base lm_device_cpu)
