// An Error as one line of text and back: what a door has against a run, on its way to its rank and from there
// to all others.
#pragma once

#include <string>

#include "base/error.h"

namespace lm {

// The call by which ranks tell one another: until they have passed it the run's directory is not theirs.
inline constexpr char kRefusalCall[] = "what doors have found";

std::string refusal_text(const Error& error);
Error parse_refusal(const std::string& text);

}  // namespace lm
