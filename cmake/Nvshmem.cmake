# The network plug-in, libdeep_moe_nvshmem.so: kernels between nodes over NVSHMEM. With -DDEEP_MOE_NVSHMEM_DIR=FOLDER, where
# include/nvshmem.h and lib/libnvshmem_device.a lie (the folder nvidia/nvshmem of the Python package). One shared library,
# closed in itself: nothing that links deep_moe has to know of relocatable device code.
if(NOT DEEP_MOE_WITH_CUDA AND DEEP_MOE_NVSHMEM_DIR STREQUAL "$ENV{NVSHMEM_DIR}")
  message(STATUS "deep_moe: NVSHMEM_DIR is set, but there is no CUDA (${DEEP_MOE_CUDA_SUMMARY}): no network plug-in")
  return()
endif()
set(nvshmem_include "${DEEP_MOE_NVSHMEM_DIR}/include")
find_library(DEEP_MOE_NVSHMEM_DEVICE NAMES libnvshmem_device.a PATHS "${DEEP_MOE_NVSHMEM_DIR}/lib" NO_DEFAULT_PATH)
find_library(
  DEEP_MOE_NVSHMEM_HOST NAMES libnvshmem_host.so.3 libnvshmem_host.so PATHS "${DEEP_MOE_NVSHMEM_DIR}/lib"
  NO_DEFAULT_PATH)
mark_as_advanced(DEEP_MOE_NVSHMEM_DEVICE DEEP_MOE_NVSHMEM_HOST)
if(NOT EXISTS "${nvshmem_include}/nvshmem.h" OR NOT DEEP_MOE_NVSHMEM_DEVICE OR NOT DEEP_MOE_NVSHMEM_HOST)
  message(FATAL_ERROR "DEEP_MOE_NVSHMEM_DIR=${DEEP_MOE_NVSHMEM_DIR} has no include/nvshmem.h, lib/libnvshmem_device.a or "
                      "lib/libnvshmem_host.so.3")
endif()
if(NOT DEEP_MOE_WITH_CUDA)
  message(FATAL_ERROR "DEEP_MOE_NVSHMEM_DIR needs CUDA, and this build has none: ${DEEP_MOE_CUDA_SUMMARY}")
endif()

# The code of the intranode kernels' launch helper that these need is compiled in again: the plug-in links nothing of
# the library, which may lie in a Python module that shows none of its symbols.
add_library(deep_moe_nvshmem SHARED cpp/nvshmem/plugin.cu cpp/nvshmem/features.cu)
target_link_libraries(deep_moe_nvshmem PRIVATE deep_moe::layout deep_moe_own_flags deep_moe::cudart
                                               "${DEEP_MOE_NVSHMEM_DEVICE}" "${DEEP_MOE_NVSHMEM_HOST}")
target_include_directories(deep_moe_nvshmem SYSTEM PRIVATE "${nvshmem_include}")
deep_moe_cuda_target(deep_moe_nvshmem)
set_target_properties(
  deep_moe_nvshmem
  PROPERTIES CUDA_SEPARABLE_COMPILATION ON
             CUDA_RESOLVE_DEVICE_SYMBOLS ON
             BUILD_RPATH "${DEEP_MOE_NVSHMEM_DIR}/lib"
             INSTALL_RPATH "\$ORIGIN/../nvidia/nvshmem/lib")
target_compile_options(deep_moe_nvshmem PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-gnu-unique>")
target_link_options(deep_moe_nvshmem PRIVATE "LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/plugin.map")
install(TARGETS deep_moe_nvshmem LIBRARY DESTINATION .)

# What a program of this tree links to have the network.
add_library(deep_moe_internode INTERFACE)
target_link_libraries(deep_moe_internode INTERFACE deep_moe_nvshmem deep_moe)
target_link_options(deep_moe_internode INTERFACE "LINKER:--no-as-needed"
                    "LINKER:--allow-shlib-undefined")
add_library(deep_moe::internode ALIAS deep_moe_internode)
