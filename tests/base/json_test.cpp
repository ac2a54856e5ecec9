#include "base/json.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lm {
namespace {

std::string refusal(const std::string& text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, "some.json", limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_EQ(error.text().area, "FILE-21");
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 100);
  return "";
}

TEST(Json, BuildsTheSameDocumentAsTheLibrary) {
  for (const std::string text : {"null", "[]", "{}", "7", "-7", "1.5e3", "\"a\\u00e9\\n\"", "true",
                                 " {\"a\":[1,[2,{}],{\"b\":{}}],\"c\":\"d\"} ", "[[],[[]],{\"a\":[]}]",
                                 "18446744073709551615", "{\"\":{\"\":[0]},\"a\":null}"}) {
    EXPECT_EQ(parse_json(text, "x"), Json::parse(text)) << text;
  }
}

TEST(Json, DepthIsCappedExactly) {
  const JsonLimits limits{.bytes = 1000, .depth = 3};
  EXPECT_NO_THROW(parse_json("[[[1]]]", "x", limits));
  EXPECT_NE(refusal("[[[[1]]]]", limits).find("deeper than 3"), std::string::npos);
  EXPECT_NO_THROW(parse_json("{\"a\":[{\"b\":1}]}", "x", limits));
  EXPECT_NE(refusal("{\"a\":[{\"b\":{}}]}", limits).find("deeper than 3"), std::string::npos);
  refusal(std::string(1000, '['), limits);
  refusal(std::string(1'000'000, '['));
}

TEST(Json, SizeIsCappedBeforeAnythingIsRead) {
  const JsonLimits limits{.bytes = 10, .depth = 3};
  EXPECT_NO_THROW(parse_json("[1,2,3,45]", "x", limits));
  EXPECT_NE(refusal("[1,2,3,456]", limits).find("11 bytes"), std::string::npos);
}

TEST(Json, AKeyTwiceIsRefusedWithItsByte) {
  const std::string message = refusal("{\"a\":1,\"b\":{\"a\":2},\"a\":3}");
  EXPECT_NE(message.find("\"a\" appears twice"), std::string::npos) << message;
  // The parser has read the second key and nothing after it.
  EXPECT_NE(message.find("some.json, byte 22"), std::string::npos) << message;
  EXPECT_NE(refusal("{\"a\":1,\"\\u0061\":3}").find("twice"), std::string::npos);
}

TEST(Json, DamageIsRefusedWithAShortMessage) {
  for (const std::string& text : std::vector<std::string>{
           "", " ", "{", "[1,]", "{\"a\"}", "{\"a\":}", "nul", "[1] x", "{}{}", "'a'", "[1e999]", "\"\xff\"",
           "\"\n\"", "NaN", "// comment\n1", std::string("1\0", 2), std::string("{}\0{", 4),
           "[\"" + std::string(100000, 'x')}) {
    const std::string message = refusal(text);
    EXPECT_LT(message.size(), 500u);
    EXPECT_NE(message.find("some.json, byte "), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace lm
