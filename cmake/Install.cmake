# The install tree, relocatable: include/, lib/libdeep_moe.a, lib/cmake/deep_moe. The wheel carries the same tree inside
# the package folder, where 'python -m deep_moe --cmake-dir' points at it. The build tree can be found just so, with
# -Ddeep_moe_DIR=<build tree>.
if(DEEP_MOE_PREFIX)
  install(DIRECTORY "${DEEP_MOE_PREFIX}/" DESTINATION .)
  return()
endif()
include(CMakePackageConfigHelpers)
set(cmake_dir lib/cmake/deep_moe)

install(TARGETS deep_moe EXPORT deep_moeTargets ARCHIVE DESTINATION lib)
install(EXPORT deep_moeTargets NAMESPACE deep_moe:: DESTINATION ${cmake_dir})
install(DIRECTORY cpp/include/deep_moe "${PROJECT_BINARY_DIR}/include/deep_moe" DESTINATION include
        FILES_MATCHING PATTERN "*.hpp")
if(DEEP_MOE_WITH_CUDA)
  install(FILES "${DEEP_MOE_CUDART_STATIC}" DESTINATION lib/deep_moe)
endif()

# deep_moeConfig.cmake in both kinds of tree; they differ in where the CUDA runtime and the network plug-in lie.
function(deep_moe_config output cudart plugin)
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/deep_moeConfig.cmake.in" "${output}"
                                INSTALL_DESTINATION ${cmake_dir} NO_SET_AND_CHECK_MACRO)
endfunction()
deep_moe_config("${PROJECT_BINARY_DIR}/install/deep_moeConfig.cmake"
                "\${PACKAGE_PREFIX_DIR}/lib/deep_moe/libcudart_static.a"
                "\${PACKAGE_PREFIX_DIR}/libdeep_moe_nvshmem.so")
deep_moe_config("${PROJECT_BINARY_DIR}/deep_moeConfig.cmake" "${DEEP_MOE_CUDART_STATIC}"
                "${PROJECT_BINARY_DIR}/libdeep_moe_nvshmem.so")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/deep_moeConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/install/deep_moeConfig.cmake" "${PROJECT_BINARY_DIR}/deep_moeConfigVersion.cmake"
        DESTINATION ${cmake_dir})
export(TARGETS deep_moe deep_moe_layout deep_moe_own_flags NAMESPACE deep_moe::
       FILE "${PROJECT_BINARY_DIR}/deep_moeTargets.cmake")
