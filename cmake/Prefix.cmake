# DEEP_MOE_PREFIX: the Python module takes the library out of an install tree of this same source, so that the modules for
# several Python versions share one compilation (ci/wheels.sh). Sets DEEP_MOE_LIBRARY, the target to link.
if(DEEP_MOE_BUILD_TESTS OR DEEP_MOE_BUILD_EXAMPLES)
  message(FATAL_ERROR "DEEP_MOE_PREFIX is for the Python module alone: leave tests and examples off")
endif()
set(prefix_library "${DEEP_MOE_PREFIX}/lib/libdeep_moe.a")
set(prefix_config "${DEEP_MOE_PREFIX}/lib/cmake/deep_moe/deep_moeConfig.cmake")
foreach(file IN ITEMS "${prefix_library}" "${prefix_config}")
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "DEEP_MOE_PREFIX is '${DEEP_MOE_PREFIX}', where there is no ${file}")
  endif()
endforeach()
# What the module says of itself has to be true of the library.
foreach(line IN ITEMS "set(deep_moe_CUDA ${DEEP_MOE_WITH_CUDA})"
                      "set(deep_moe_CUDA_ARCHITECTURES \"${DEEP_MOE_CUDA_ARCHITECTURES}\")"
                      "set(deep_moe_SM90_ARCHITECTURES \"${DEEP_MOE_SM90_ARCHITECTURES}\")")
  file(READ "${prefix_config}" config)
  string(FIND "${config}" "${line}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "DEEP_MOE_PREFIX: ${prefix_config} lacks '${line}': its library was built otherwise than this module")
  endif()
endforeach()

set_target_properties(deep_moe deep_moe_kernels PROPERTIES EXCLUDE_FROM_ALL ON)
add_library(deep_moe_installed STATIC IMPORTED)
get_target_property(interface_libraries deep_moe INTERFACE_LINK_LIBRARIES)
set_target_properties(deep_moe_installed PROPERTIES IMPORTED_LOCATION "${prefix_library}"
                                                    INTERFACE_LINK_LIBRARIES "${interface_libraries}"
                                                    INTERFACE_COMPILE_FEATURES cxx_std_20)
set(DEEP_MOE_LIBRARY deep_moe_installed)
