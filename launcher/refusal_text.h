// An Error as one line of text and back: how a CLI process passes its refusal of a run to its rank, and from
// there to all others.
#pragma once

#include <string>

#include "base/error.h"

namespace lm {

// The collective by which ranks exchange refusals: until it is passed the run's directory is not theirs.
inline constexpr char kRefusalCall[] = "refusals of the run";

std::string refusal_text(const Error& error);
Error parse_refusal(const std::string& text);

}  // namespace lm
