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

}  // namespace lm::test
