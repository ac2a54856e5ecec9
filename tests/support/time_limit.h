// Limits of time that tests hold code to.
#pragma once

namespace lm::test {

// Of the code as it is shipped, in any unit; a sanitizer makes the same code many times slower, and is not
// there to judge its speed.
constexpr double time_limit(double limit) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr double kSlower = 30;
  return kSlower * limit;
#else
  return limit;
#endif
}

}  // namespace lm::test
