// The least that a test needs: a count of what did not hold.
#pragma once

#include <cstdio>

inline int failures = 0;

#define EXPECT(condition)                                                   \
  do {                                                                      \
    if (!(condition)) {                                                     \
      ++failures;                                                           \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
    }                                                                       \
  } while (false)
