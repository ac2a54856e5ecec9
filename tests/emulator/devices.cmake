# The two of the emulator's libraries that the CLI process meets: cards in /dev and in NVML. They need neither CUDA nor LibTorch, so
# that the CLI's own tests use them, too. Without lm_flags: a library that is preloaded must not bring a sanitizer or a
# thread pool of its own.
function(lm_emulator_device_library name)
  add_library(${name} SHARED ${ARGN})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${LM_WERROR}>:-Werror>)
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/emulator/lib)
endfunction()

lm_emulator_device_library(emulator_nvml ${CMAKE_CURRENT_LIST_DIR}/nvml.cpp)
set_target_properties(emulator_nvml PROPERTIES OUTPUT_NAME nvidia-ml SOVERSION 1)  # libnvidia-ml.so.1
lm_emulator_device_library(emulator_devices ${CMAKE_CURRENT_LIST_DIR}/devices.cpp)
target_link_libraries(emulator_devices PRIVATE ${CMAKE_DL_LIBS})
