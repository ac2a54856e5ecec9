// What tests cannot hold code to that runs under a sanitizer.
#pragma once

namespace lm::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // its memory is mostly the sanitizer's own
#else
constexpr bool kSanitized = false;
#endif

// The thread sanitizer starts a program anew without its limit of addresses.
#if defined(__SANITIZE_THREAD__)
constexpr bool kLiftsAddressLimit = true;
#else
constexpr bool kLiftsAddressLimit = false;
#endif

// A limit of time for code as it is shipped, in any unit. A sanitizer makes it many times slower, and is not
// there to judge its speed.
constexpr double time_limit(double limit) {
  constexpr double kSlower = 30;
  return kSanitized ? kSlower * limit : limit;
}

}  // namespace lm::test
