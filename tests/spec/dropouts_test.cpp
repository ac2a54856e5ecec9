// Dropouts that config.json names: which are read, refused, and told.
#include "spec/dropouts.h"

#include "family_files.h"

namespace lm {
namespace {

using namespace family_files;

TEST(Dropouts, AreRefusedWhereTheFilesOfAFamilyHaveNone) {
  for (const char* key : {"attention_dropout", "resid_pdrop", "embd_pdrop"})
    expect_refused(with(small("phi3"), key, 0.1), key);
  for (const double p : {-0.1, 1.0, 2.0}) expect_refused(with(gpt2(), "resid_pdrop", p), "resid_pdrop");
  expect_refused(with(small("starcoder2"), "embedding_dropout", 1), "embedding_dropout");
}

TEST(Dropouts, AreThoseOfTheFileOrOfTheClass) {
  const auto expect = [](const json& config, double embedding, double residual) {
    const ModelSpec spec = parse(config);
    EXPECT_EQ(spec.embedding.dropout, embedding);
    for (const LayerSpec& layer : spec.layers)
      for (const SublayerSpec& sublayer : layer.sublayers) EXPECT_EQ(sublayer.dropout, residual);
  };
  expect(gpt2(), 0.1, 0.1);
  expect(with(with(gpt2(), "embd_pdrop", 0.25), "resid_pdrop", 0), 0.25, 0);
  expect(small("starcoder2"), 0, 0);
  expect(with(with(small("starcoder2"), "embedding_dropout", 0.2), "residual_dropout", 0.3), 0.2, 0.3);
  expect(with(small("gemma"), "resid_pdrop", 0.5), 0, 0);  // not its key
}

TEST(Dropouts, ThatTrainingAppliesAndLeavesOutAreNamed) {
  using Names = std::vector<std::string>;
  const auto expect = [](const json& config, const Names& applied, const Names& left_out) {
    const NamedDropouts names = named_dropouts(config.dump(), "config.json");
    EXPECT_EQ(names.applied, applied);
    EXPECT_EQ(names.left_out, left_out);
  };
  expect(gpt2(), {"embd_pdrop = 0.1", "resid_pdrop = 0.1"}, {"attn_pdrop = 0.1"});
  json without = gpt2();
  for (const char* key : {"attn_pdrop", "resid_pdrop", "embd_pdrop"}) without[key] = 0.0;
  expect(without, {}, {});
  expect(with(small("starcoder2"), "residual_dropout", 0.25), {"residual_dropout = 0.25"}, {});
  expect(with(small("starcoder2"), "attention_dropout", 0.25), {}, {"attention_dropout = 0.25"});
  expect(small("starcoder2"), {}, {});
  expect(small("gemma"), {}, {});
}

}  // namespace
}  // namespace lm
