// The number of threads that a SIMD-group has on this device.
if (thread_position_in_threadgroup.x == 0) width[0] = threads_per_simdgroup;
