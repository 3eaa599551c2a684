# The install tree, relocatable: include/, lib/libdeep_moe.a, lib/cmake/deep_moe. The wheel carries the same tree inside
# the package folder, where 'python -m deep_moe --cmake-dir' points at it.
include(CMakePackageConfigHelpers)
set(cmake_dir lib/cmake/deep_moe)

install(TARGETS deep_moe EXPORT deep_moeTargets ARCHIVE DESTINATION lib)
install(EXPORT deep_moeTargets NAMESPACE deep_moe:: DESTINATION ${cmake_dir})
install(DIRECTORY cpp/include/deep_moe DESTINATION include FILES_MATCHING PATTERN "*.hpp")
if(DEEP_MOE_WITH_CUDA)
  install(FILES "${DEEP_MOE_CUDART_STATIC}" DESTINATION lib/deep_moe)
endif()

configure_package_config_file(cmake/deep_moeConfig.cmake.in "${PROJECT_BINARY_DIR}/deep_moeConfig.cmake"
                              INSTALL_DESTINATION ${cmake_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/deep_moeConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/deep_moeConfig.cmake" "${PROJECT_BINARY_DIR}/deep_moeConfigVersion.cmake"
        DESTINATION ${cmake_dir})
