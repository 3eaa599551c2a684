# Flags of our own sources: warnings, sanitizers, and the instruction sets of the CPU backend's SIMD files.

# deep_moe_own_flags: linked PRIVATE by our targets alone; nothing of it reaches those who use the library.
add_library(deep_moe_own_flags INTERFACE)
set(warnings -Wall -Wextra -Wshadow)
target_compile_options(deep_moe_own_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings};-Wnon-virtual-dtor>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # gcc 12 sees overlapping copies in "text" + std::string (its bug 105651).
  target_compile_options(deep_moe_own_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()
if(DEEP_MOE_WERROR)
  target_compile_options(deep_moe_own_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>"
                                                      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")
endif()
list(JOIN warnings "," cuda_warnings)
target_compile_options(deep_moe_own_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${cuda_warnings}>")

# Sanitizers go on everything, so that tests, examples and the library agree.
if(DEEP_MOE_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(DEEP_MOE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(NOT DEEP_MOE_SANITIZE STREQUAL "")
  message(FATAL_ERROR "DEEP_MOE_SANITIZE is '${DEEP_MOE_SANITIZE}'; allowed: empty, thread, address")
endif()
if(DEEP_MOE_SANITIZE AND DEEP_MOE_BUILD_PYTHON)
  message(FATAL_ERROR "DEEP_MOE_SANITIZE and DEEP_MOE_BUILD_PYTHON exclude each other: the sanitizers run on the C++ tests")
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(DEEP_MOE_X86_64 ON)
else()
  set(DEEP_MOE_X86_64 OFF)
endif()

# No multiply-add contraction anywhere in the CPU backend: sums are bit-equal on every machine. Files named *_avx2.cc and
# *_avx512.cc get their instruction set; where there is none they are taken off the list.
function(deep_moe_cpu_source_flags list_name)
  set(kept "")
  foreach(source IN LISTS ${list_name})
    set(flags -ffp-contract=off)
    if(source MATCHES "_avx(2|512)\\.cc$")
      if(NOT DEEP_MOE_X86_64)
        continue()
      endif()
      if(CMAKE_MATCH_1 STREQUAL "2")
        list(APPEND flags -mavx2 -mfma -mf16c)
      else()
        list(APPEND flags -mavx512f -mavx512bw -mavx512vl -mavx512dq)
      endif()
    endif()
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS ${flags})
    list(APPEND kept "${source}")
  endforeach()
  set(${list_name} "${kept}" PARENT_SCOPE)
endfunction()
