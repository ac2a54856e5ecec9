#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "tests/config/failure.h"
#include "tests/support/same_config.h"

namespace lm {
namespace {

TEST(Config, DefaultsHoldWhereNothingIsSaid) {
  const Config config = parse_config(kLeast, "c.toml");
  EXPECT_EQ(config.model.path, "m");
  EXPECT_EQ(config.data.train, std::vector<std::string>{"t.jsonl"});
  EXPECT_EQ(config.train.global_batch, 8);
  EXPECT_FALSE(config.train.micro_batch.has_value());
}

TEST(Config, ReadsEveryKindOfValue) {
  const Config config = parse_config(std::string(kLeast) + R"(
[train]
epochs = 3            # an integer where a number is asked
micro_batch = "auto"
recompute = "block"
[optimizer]
betas = [0.9, 0.95]
schedule = "cosine_warmup_with_min_lr"
lr = 1e-4
[lora]
targets = "all-linear"
rslora = true
)",
                                     "c.toml");
  EXPECT_EQ(config.train.epochs, 3.0);
  EXPECT_EQ(config.train.recompute, Recompute::kBlock);
  EXPECT_EQ(config.optimizer.rule.of<AdamW>().betas, (std::vector<double>{0.9, 0.95}));
  EXPECT_EQ(config.optimizer.schedule, LrSchedule::kCosineWarmupWithMinLr);
  EXPECT_EQ(config.optimizer.lr, 1e-4);
  EXPECT_EQ(config.lora.targets, std::vector<std::string>{"all-linear"});
  EXPECT_TRUE(config.lora.rslora);
}

TEST(Config, ReportsEveryMistakeAtOnceInFileOrder) {
  const std::string text = failure(
      "[model]\npath = \"m\"\n[data]\ntrain = [\"t\"]\n[train]\nstpes = 3\nglobal_batch = \"8\"\n"
      "[optimizer]\nlr = -1\n[wrong]\nx = 1\n",
      {"train.epoch=1"});
  const char* const expected[] = {
      "5 mistakes:",
      "c.toml:6:1: unknown key `stpes` in [train]; did you mean `steps`?",
      "c.toml:7:16: `train.global_batch`: expected an integer from 1 to 1000000000, got the string \"8\"",
      "c.toml:9:6: `optimizer.lr`: expected a number from 0 to 1000000, got -1",
      "c.toml:10:2: unknown table [wrong]",
      "command line: unknown key `train.epoch`; did you mean `epochs`?",
  };
  size_t from = 0;
  for (const char* part : expected) {
    const size_t hit = text.find(part, from);
    EXPECT_NE(hit, std::string::npos) << part << "\n" << text;
    if (hit != std::string::npos) from = hit;
  }
}

TEST(Config, OneMistakeIsOneLineWithItsPlace) {
  EXPECT_EQ(
      failure(std::string(kLeast) + "[train]\nsteps = 0\n"),
      "lmlaunch: error CONF-20 (exit 10): `train.steps`: expected an integer of at least 1, or \"auto\", "
      "got 0 at c.toml:6:9\n"
      "  next: correct it; `lmlaunch presets` lists commented configurations to start from\n");
}

TEST(Config, QloraIsLoraOfAQuantizedModel) {
  const auto with = [](const std::string& keys, const std::vector<std::string>& overrides = {}) {
    return parse_config(std::string(kLeast) + keys, "c.toml", overrides);
  };
  const std::string qlora = "[train]\nmethod = \"qlora\"\n";
  const Config config = with(qlora);
  EXPECT_EQ(config.train.method, Method::kLora);
  EXPECT_EQ(config.model.quantize, Quantize::kNf4);
  EXPECT_TRUE(config.model.double_quantize);
  EXPECT_EQ(with(qlora, {"model.quantize=int8"}).model.quantize, Quantize::kInt8);
  EXPECT_TRUE(same_config(config, with("[train]\nmethod = \"lora\"\n", {"model.quantize=nf4"})));
  EXPECT_TRUE(same_config(config, parse_config(print_config(config), "again")));
  EXPECT_FALSE(same_config(config, with(qlora, {"model.double_quantize=false"})));
  // Of no 4-bit codes there are no double scales.
  EXPECT_TRUE(config_difference(with(qlora, {"model.quantize=int8"}),
                                with(qlora, {"model.quantize=int8", "model.double_quantize=false"}))
                  .empty());
  EXPECT_HAS(failure(std::string(kLeast) + qlora, {"model.quantize=none"}),
             "train.method = \"qlora\" trains adapters of a quantized model");
  EXPECT_HAS(failure(kLeast, {"model.quantize=nf4"}), "set train.method = \"qlora\"");
}

// As messages list them.
std::string rule_names() {
  std::string out;
  for (const char* const name :
       {"adamw", "sgd", "lion", "adamw_8bit", "lion_8bit", "adafactor", "adafactor_lowmem", "adamw_4bit",
        "adamw_fp8", "muon", "adamw_bf16", "adamw_anyprecision"})
    out += (out.empty() ? "\"" : ", \"") + std::string(name) + "\"";
  return out;
}

TEST(Config, NamesWhatIsNotSupportedYet) {
  EXPECT_HAS(failure(std::string(kLeast) + "[optimizer]\nname = \"adam\"\n"),
             "expected one of " + rule_names() + ", got the string \"adam\"; did you mean \"adamw\"?");
}

TEST(Config, AnOptimizerHasTheKeysOfItsRuleAndNoOthers) {
  const auto with = [](const std::string& keys, const std::vector<std::string>& overrides = {}) {
    return parse_config(std::string(kLeast) + "[optimizer]\n" + keys, "c.toml", overrides);
  };
  const auto refusal = [](const std::string& keys) {
    return failure(std::string(kLeast) + "[optimizer]\n" + keys);
  };
  EXPECT_EQ(with("name = \"sgd\"\nmomentum = 0.5\nweight_decay = 0.1\n").optimizer.rule.of<Sgd>().momentum,
            0.5);
  EXPECT_HAS(refusal("name = \"sgd\"\nmomentum = 1\n"),
             "expected a number of at least 0 and less than 1, got 1");
  EXPECT_HAS(refusal("name = \"sgd\"\neps = 1e-6\n"),
             "`optimizer.eps` is a setting of adamw, adamw_8bit, adafactor, adamw_4bit, adamw_fp8, muon, "
             "adamw_bf16, adamw_anyprecision, and optimizer.name = \"sgd\" has no "
             "such setting at c.toml:7:7");
  EXPECT_HAS(
      refusal("momentum = 0.5\n"),
      "`optimizer.momentum` is a setting of sgd, muon, and optimizer.name = \"adamw\" has no such setting");
  // A rule chosen on the command line takes back the file's keys, not its own.
  EXPECT_EQ(with("eps = 1e-6\n", {"optimizer.name=sgd"}).optimizer.name, Rules::id<Sgd>());
  EXPECT_HAS(failure(std::string(kLeast), {"optimizer.name=sgd", "optimizer.eps=1e-6"}),
             "has no such setting");
  // What is printed has the rule's keys alone, and is read back.
  const std::string text = print_config(with("name = \"sgd\"\nmomentum = 0.25\n"));
  EXPECT_HAS(text, "momentum = 0.25");
  EXPECT_HAS(text, "# gradient descent with momentum; weight decay is added to the gradient (one of " +
                       rule_names() + ")");
  EXPECT_EQ(text.find("betas"), std::string::npos);
  EXPECT_TRUE(same_config(parse_config(text, "", {}), with("name = \"sgd\"\nmomentum = 0.25\n")));
  EXPECT_EQ(print_config(with("")).find("momentum ="), std::string::npos);
}

TEST(Config, ARuleWithoutMastersTrainsBf16Weights) {
  const std::string rule = std::string(kLeast) + "[optimizer]\nname = \"adamw_bf16\"\n";
  const OptimizerConfig optimizer =
      parse_config(rule + "rounding = \"stochastic\"\n", "c.toml", {}).optimizer;
  EXPECT_EQ(optimizer.master, Master::kNone);
  EXPECT_EQ(master_form(optimizer.name, optimizer.rule, optimizer.master, DType::kBF16),
            MasterForm::kStochastic);
  const OptimizerConfig nearest = parse_config(rule, "c.toml", {}).optimizer;
  EXPECT_EQ(master_form(nearest.name, nearest.rule, nearest.master, DType::kBF16), MasterForm::kNearest);
  EXPECT_HAS(failure(rule + "master = \"split\"\n"),
             "optimizer.master = \"split\" and optimizer.name = \"adamw_bf16\", which has no master weights");
  EXPECT_HAS(failure(rule, {"model.dtype=fp32"}), "optimizer.name = \"adamw_bf16\" trains bf16 weights");
  EXPECT_HAS(failure(rule, {"train.method=lora", "lora.dtype=fp32"}), "and lora.dtype = \"fp32\"");
  // On the command line it takes back the file's master weights; what is printed is read back.
  const std::string file = std::string(kLeast) + "[optimizer]\nmaster = \"split\"\n";
  EXPECT_EQ(parse_config(file, "c.toml", {"optimizer.name=adamw_bf16"}).optimizer.master, Master::kNone);
  EXPECT_TRUE(same_config(parse_config(print_config(parse_config(rule, "c.toml", {})), "", {}),
                          parse_config(rule, "c.toml", {})));
}

TEST(Config, ReadsParameterGroups) {
  const auto with = [](const std::string& groups) {
    return parse_config(std::string(kLeast) + "[optimizer]\ngroups = " + groups + "\n", "c.toml", {});
  };
  const auto refusal = [](const std::string& groups) {
    return failure(std::string(kLeast) + "[optimizer]\ngroups = " + groups + "\n");
  };
  const Config config =
      with("[{match = \"q_proj\", lr_scale = 0.1}, {match = \"regex:norm|bias$\", weight_decay = 0}]");
  ASSERT_EQ(config.optimizer.groups.size(), 2U);
  EXPECT_EQ(config.optimizer.groups[0].lr_scale, 0.1);
  EXPECT_FALSE(config.optimizer.groups[0].weight_decay.has_value());
  EXPECT_EQ(config.optimizer.groups[1].lr_scale, 1);
  EXPECT_EQ(config.optimizer.groups[1].weight_decay, 0.0);
  EXPECT_EQ(with("[{match = \"q_proj\"}]").optimizer.groups.size(), 1U);
  EXPECT_TRUE(same_config(parse_config(print_config(config), "", {}), config));
  for (const char* const wrong :
       {"[{lr_scale = 0.1}]", "[{match = \"\"}]", "[{match = \"a\", lr_scale = -1}]",
        "[{match = \"a\", lr = 1}]", "[{match = \"a\", weight_decay = \"0\"}]", "{match = \"a\"}", "[\"a\"]",
        "[{match = 3}]"})
    EXPECT_HAS(refusal(wrong), "`optimizer.groups`: expected a list of tables such as {match = \"lm_head\"")
        << wrong;
  EXPECT_HAS(refusal("[{match = \"regex:[q\"}]"), "match = \"regex:[q\" is no regular expression: ");
  EXPECT_HAS(refusal("[{match = \"regex:[q\"}]"), "c.toml:6:10");
  // A run resumes with other groups only where it is told to.
  const auto difference = config_difference(config, with("[{match = \"q_proj\", lr_scale = 0.2}]"));
  ASSERT_EQ(difference.size(), 1U);
  EXPECT_EQ(difference[0].key, "optimizer.groups");
  EXPECT_EQ(difference[0].asked, "[{match = \"q_proj\", lr_scale = 0.2}]");
}

TEST(Config, KnowsWhatOthersCallARule) {
  const auto optimizer = [](const std::string& name) {
    return parse_config(std::string(kLeast) + "[optimizer]\nname = \"" + name + "\"\n", "c.toml", {})
        .optimizer;
  };
  for (const char* name : {"adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"}) {
    EXPECT_EQ(optimizer(name).name, Rules::id<AdamW>()) << name;
    EXPECT_EQ(optimizer(name).written, name);
  }
  for (const char* name :
       {"adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "bitsandbytes.optim.PagedAdamW8bit"})
    EXPECT_EQ(optimizer(name).name, Rules::id<AdamW8bit>()) << name;
  EXPECT_EQ(optimizer("paged_lion_32bit").name, Rules::id<Lion>());
  EXPECT_EQ(optimizer("paged_lion_8bit").name, Rules::id<Lion8bit>());
  EXPECT_EQ(optimizer("adamw_8bit").written, "");  // ours
  EXPECT_HAS(failure(std::string(kLeast) + "[optimizer]\nname = \"paged_adamw_8bits\"\n"),
             "did you mean \"paged_adamw_8bit\"?");
  EXPECT_HAS(failure(std::string(kLeast) + "[optimizer]\nname = \"galore_adamw_8bit\"\n"),
             "\"galore_adamw_8bit\"; GaLore's steps follow from singular vectors");
  // A run keeps our name, and goes on whichever was written.
  const Config theirs =
      parse_config(std::string(kLeast) + "[optimizer]\nname = \"adamw_bnb_8bit\"\n", "", {});
  EXPECT_HAS(print_config(theirs), "name = \"adamw_8bit\"");
  EXPECT_TRUE(same_config(theirs, parse_config(print_config(theirs), "", {})));
}

TEST(Config, KnowsTheWordsPeopleBring) {
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nlearning_rate = 1\n"), "did you mean `optimizer.lr`?");
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nlr = 1\n"), "it belongs to [optimizer]");
  // Mistyped, too.
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nlearing_rate = 1\n"), "did you mean `optimizer.lr`?");
  EXPECT_HAS(failure(std::string(kLeast) + "[optimizer]\nlearing_rate = 1\n"),
             "did you mean `optimizer.lr`?");
  EXPECT_HAS(failure("steps = 3\n" + std::string(kLeast)), "outside of a table; it belongs to [train]");
  EXPECT_HAS(failure(std::string(kLeast) + "[trian]\nsteps = 1\n"), "did you mean [train]?");
}

TEST(Config, AnOverrideWinsOverTheKeyThatItExcludes) {
  const std::string epochs = std::string(kLeast) + "[train]\nepochs = 3\n",
                    steps = std::string(kLeast) + "[train]\nsteps = 9\n";
  Config config = parse_config(epochs, "c.toml", {"train.steps=5"});
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.train.epochs, std::nullopt);
  config = parse_config(steps, "c.toml", {"train.epochs=2"});
  EXPECT_EQ(config.train.epochs, 2.0);
  EXPECT_EQ(config.train.steps, std::nullopt);
  config = parse_config(epochs, "c.toml", {"train.steps=auto"});  // asks for nothing
  EXPECT_EQ(config.train.epochs, 3.0);
  const std::string eval = "model.path = \"m\"\ndata.train = [\"t\"]\n";
  config = parse_config(eval + "data.eval = [\"e\"]\n", "c.toml", {"data.eval_fraction=0.1"});
  EXPECT_TRUE(config.data.eval.empty());
  config = parse_config(eval + "data.eval_fraction = 0.1\n", "c.toml", {"data.eval=e"});
  EXPECT_EQ(config.data.eval_fraction, 0);
  // Who contradicts himself is asked.
  EXPECT_HAS(failure(epochs + "steps = 5\n"), "exclude each other");
  EXPECT_HAS(failure(kLeast, {"train.steps=5", "train.epochs=1"}), "exclude each other");
  EXPECT_HAS(failure(epochs + "steps = 5\n", {"train.eval_every=0"}), "exclude each other");
}

TEST(Config, ASizeWithoutAUnitIsRefusedWithTheLikelyOne) {
  const auto refusal = [](const std::string& more) { return failure(std::string(kLeast) + more); };
  EXPECT_HAS(refusal("[offload]\nhost_memory = \"24\"\n"),
             "got the string \"24\" without a unit; did you mean \"24GiB\"?");
  EXPECT_HAS(refusal("[offload]\ndevice_memory = 24\n"), "got 24 without a unit; did you mean \"24GiB\"?");
  EXPECT_HAS(refusal("[offload]\ndisk_limit = 17179869184\n"),
             "got 17179869184 without a unit; did you mean \"16GiB\"?");
  EXPECT_HAS(refusal("[io]\ntile = 16\n"), "got 16 without a unit; did you mean \"16MiB\"?");
  for (const char* word : {"offload.host_memory=24", "offload.host_memory=\"24\""}) {
    try {
      parse_config(kLeast, "c.toml", {word});
      FAIL() << word;
    } catch (const Error& error) {
      EXPECT_HAS(std::string(error.what()), "did you mean \"24GiB\"?");
    }
  }
}

TEST(Config, SizesAreWordsAndBudgetsMayBeShares) {
  const auto offload = [](const std::string& rest) {
    return parse_config(std::string(kLeast) + "[offload]\npaths = \"/fast\"\n" + rest, "c.toml");
  };
  Config config = offload("optimizer = \"nvme\"\nhost_memory = \"1.5 GiB\"\n[io]\ntile = \"16MiB\"\n");
  EXPECT_EQ(config.offload.optimizer, OffloadTier::kNvme);
  EXPECT_EQ(config.offload.host_memory.bytes, 1610612736);
  EXPECT_EQ(config.io.tile->bytes, 16777216);
  EXPECT_DOUBLE_EQ(config.offload.device_memory.share, 0.9);
  config = offload("host_memory = \"45%\"\n");
  EXPECT_DOUBLE_EQ(config.offload.host_memory.share, 0.45);
  EXPECT_HAS(print_config(config), "host_memory = \"45%\"");
  config = offload("host_memory = \"1e-6%\"\n");
  EXPECT_TRUE(same_config(config, parse_config(print_config(config), "again")));
  EXPECT_HAS(failure(std::string(kLeast) + "[offload]\nhost_memory = \"4e-324%\"\n"), "a share such as");
  EXPECT_HAS(failure(std::string(kLeast) + "[offload]\nhost_memory = \"101%\"\n"),
             "`offload.host_memory`: expected a size such as \"24GiB\" or a share such as \"90%\", got the "
             "string \"101%\"");
  EXPECT_HAS(failure(std::string(kLeast) + "[io]\nblock = \"2KiB\"\n"),
             "`io.block`: expected a size such as \"16MiB\", from 4KiB to 1GiB, or \"auto\", got the string "
             "\"2KiB\"");
  EXPECT_HAS(failure(std::string(kLeast) + "[io]\nblock = \"5000B\"\n"), "is not a multiple of 4KiB");
  EXPECT_HAS(failure(std::string(kLeast) + "[offload]\nweights = \"nvme\"\n"),
             "offload.weights = \"nvme\" needs offload.paths");
  EXPECT_HAS(
      failure(std::string(kLeast) + "[train]\nupdate = \"in_backward\"\n[offload]\ngradients = \"host\"\n"),
      "has at most one block's");
}

TEST(Config, MissingKeysAreNamed) {
  const std::string text = failure("");
  EXPECT_HAS(text, "`model.path` is missing");
  EXPECT_HAS(text, "`data.train` is missing");
}

TEST(Config, KeysThatContradictEachOtherAreBothNamed) {
  const auto conflict = [](const std::string& rest) { return failure(kLeast + rest); };
  EXPECT_HAS(conflict("[train]\nepochs = 1\nsteps = 10\n"), "train.steps = 10 and train.epochs = 1.0");
  EXPECT_HAS(
      conflict("[train]\nglobal_batch = 10\nmicro_batch = 4\n"),
      "train.global_batch = 10 is not divisible by train.micro_batch = 4: 10 = 2 x 4 + 2 at c.toml:7:15");
  EXPECT_HAS(conflict("[train]\nsteps = 10\n[optimizer]\nwarmup = 11\n"),
             "optimizer.warmup = 11 steps is more than train.steps = 10");
  EXPECT_HAS(conflict("[optimizer]\nwarmup = 1.5\n"), "neither a fraction");
  EXPECT_HAS(conflict("[optimizer]\nwarmup = 5\nschedule = \"constant\"\n"), "constant_with_warmup");
  EXPECT_HAS(conflict("[optimizer]\nmin_lr_ratio = 0.1\nschedule = \"constant_with_warmup\"\n"),
             "optimizer.min_lr_ratio = 0.1 is the final value of a decaying schedule");
  EXPECT_HAS(conflict("eval = [\"e\"]\neval_fraction = 0.1\n"), "data.eval names files");
  EXPECT_HAS(conflict("[train]\neval_every = 5\n"), "data.eval");
  EXPECT_HAS(conflict("[optimizer]\nschedule = \"reduce_lr_on_plateau\"\n"), "train.eval_every (now 0)");
  EXPECT_HAS(
      failure("[model]\npath=\"m\"\ndtype=\"fp32\"\n[data]\ntrain=\"t\"\n[optimizer]\nmaster=\"split\"\n"),
      "fp32 weights need no master weights");
  EXPECT_HAS(
      failure("[model]\npath=\"m\"\ndtype=\"fp32\"\n[data]\ntrain=\"t\"\n[train]\ngradients=\"bf16\"\n"),
      "train.gradients");
  const std::string adapter = "[train]\nmethod=\"lora\"\n[lora]\ndtype=\"fp32\"\n";
  EXPECT_HAS(conflict(adapter + "[optimizer]\nmaster=\"split\"\n"),
             "lora.dtype = \"fp32\": fp32 weights need");
  EXPECT_HAS(
      failure("[model]\npath=\"m\"\n[data]\ntrain=\"t\"\n[train]\nmethod=\"qlora\"\ngradients=\"bf16\"\n"
              "[lora]\ndtype=\"fp32\"\n"),
      "lora.dtype = \"fp32\": gradients of fp32 weights");
  EXPECT_HAS(failure("[model]\npath=\"m\"\ndtype=\"fp32\"\n[data]\ntrain=\"t\"\n[train]\nmethod=\"lora\"\n"
                     "[lora]\ndtype=\"bf16\"\n"),
             "must not be less precise than the model");
  EXPECT_HAS(conflict("[lora]\ndtype = \"fp16\"\n"), "expected one of \"auto\", \"bf16\", \"fp32\"");
  EXPECT_HAS(conflict("[optimizer]\nbetas = [0.9, 1.0]\n"),
             "a list of 2 numbers, each of at least 0 and less than 1");
  EXPECT_HAS(conflict("[optimizer]\nbetas = [0.9]\n"), "a list of 2 numbers");
}

// fp32 adapters are their own master, as an fp32 model's weights; of all weights lora.dtype says nothing.
TEST(Config, AdaptersMayHaveATypeOfTheirOwn) {
  const auto with = [](const std::string& method, const std::string& dtype) {
    return parse_config(
        std::string(kLeast) + "[train]\nmethod = \"" + method + "\"\n[lora]\ndtype = \"" + dtype + "\"\n",
        "c.toml");
  };
  EXPECT_EQ(parse_config(kLeast, "c.toml").lora.dtype, LoraDType::kAuto);
  for (const char* method : {"lora", "qlora"}) {
    EXPECT_EQ(with(method, "fp32").optimizer.master, Master::kF32);
    EXPECT_EQ(with(method, "bf16").optimizer.master, Master::kSplit);
    EXPECT_EQ(with(method, "auto").optimizer.master, Master::kSplit);
  }
  EXPECT_EQ(with("full", "fp32").optimizer.master, Master::kSplit);
}

TEST(Config, OverridesWinAndTakeBareWords) {
  const Config config = parse_config(std::string(kLeast) + "[train]\nsteps = 5\n", "c.toml",
                                     {"train.steps=7", "model.path=some/dir", "run.dir=2024-01-01",
                                      "optimizer.betas=[0.8, 0.9]", "data.train=a.jsonl", "train.method=lora",
                                      "run.threads=auto", "optimizer.lr=1e-3", "lora.targets=[\"q_proj\"]"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.model.path, "some/dir");
  EXPECT_EQ(config.run.dir, "2024-01-01");
  EXPECT_EQ(config.optimizer.rule.of<AdamW>().betas, (std::vector<double>{0.8, 0.9}));
  EXPECT_EQ(config.data.train, std::vector<std::string>{"a.jsonl"});
  EXPECT_EQ(config.train.method, Method::kLora);
  EXPECT_FALSE(config.run.threads.has_value());
  EXPECT_EQ(config.lora.targets, std::vector<std::string>{"q_proj"});
}

TEST(Config, WordsThatConfigTomlCouldNotHoldAreRefused) {
  for (const char* word : {"run.dir=\xc0x", "run.dir=\"\xc0\"", "run.dir=\xed\xa0\x80"})
    EXPECT_HAS(failure(kLeast, {word}), "`run.dir`: the value is not UTF-8");
  const Config config = parse_config(kLeast, "c.toml", {"run.dir=\xc3\xa9 b"});
  EXPECT_EQ(config.run.dir, "\xc3\xa9 b");
  EXPECT_TRUE(same_config(config, parse_config(print_config(config), "again")));
}

TEST(Config, OverridesAreAsStrictAsTheFile) {
  EXPECT_HAS(failure(kLeast, {"train.stepz=7"}), "did you mean `steps`?");
  EXPECT_HAS(failure(kLeast, {"train.steps=many"}), "`train.steps`: expected an integer");
  EXPECT_HAS(failure(kLeast, {"train.steps=many"}), "at command line");
  EXPECT_HAS(failure(kLeast, {"steps=7"}), "expected table.key=value");
  EXPECT_HAS(failure(kLeast, {"train.steps=7", "train.steps=8"}), "is given twice");
  EXPECT_HAS(failure(kLeast, {"run.seed=1\n[optimizer]\nlr=1"}), "`run.seed`: expected an integer");
  EXPECT_HAS(failure(kLeast, {"zero.stage=4"}), "`zero.stage`: expected an integer");
}

TEST(Config, MessagesCannotBeForgedByNames) {
  const std::string text = failure("\"a\\nlmlaunch: stop code=0\" = 1\n" + std::string(kLeast));
  EXPECT_EQ(text.find("\nlmlaunch: stop"), std::string::npos) << text;
}

TEST(Config, AFileThatCannotBeReadIsNamed) {
  try {
    load_config("no/such.toml");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_HAS(error.report(), "No such file or directory at no/such.toml");
  }
  EXPECT_THROW(load_config("/dev/zero"), Error);
  EXPECT_THROW(load_config("/"), Error);
}

TEST(Config, Fp32WeightsAreTheirOwnMaster) {
  const Config config =
      parse_config(std::string("[model]\npath = \"m\"\ndtype = \"fp32\"\n[data]\ntrain = \"t\"\n"), "c.toml");
  EXPECT_EQ(config.optimizer.master, Master::kF32);
}

TEST(Config, NamedEvaluationSetsStandInTheOrderOfTheFile) {
  const auto names = [](const Config& config) {
    std::string out;
    for (const EvalSet& set : config.data.eval.all) out += set.name + ":" + set.files.front() + " ";
    return out;
  };
  const std::string inline_table =
      std::string(kLeast) + "eval = {zeta = [\"z\"], alpha = \"a\", b-1 = [\"b\"]}\n";
  const Config config = parse_config(inline_table, "c.toml");
  EXPECT_EQ(names(config), "zeta:z alpha:a b-1:b ");
  const Config back = parse_config(print_config(config), "printed");
  EXPECT_TRUE(same_config(config, back)) << print_config(config);
  EXPECT_EQ(names(back), names(config));
  EXPECT_EQ(names(parse_config(std::string(kLeast) + "[data.eval]\nzeta = [\"z\"]\nalpha = [\"a\"]\n", "c")),
            "zeta:z alpha:a ");
  EXPECT_EQ(names(parse_config(inline_table, "c.toml", {"data.eval={b = [\"x\"], a = [\"y\"]}"})),
            "b:x a:y ");
  EXPECT_EQ(names(parse_config(inline_table, "c.toml", {"data.eval=e"})), ":e ");
  EXPECT_TRUE(parse_config(inline_table, "c.toml", {"data.eval_fraction=0.1"}).data.eval.empty());
  EXPECT_HAS(failure(kLeast, {"data.eval.code=[\"c\"]"}),
             "this key is set as a whole, `data.eval={NAME = VALUE");
  EXPECT_HAS(failure(kLeast, {"data.eval={\"a/b\" = [\"c\"]}"}), "\"a/b\" is no valid set name");
  for (const char* wrong : {"{a = []}", "{a = 5}", "{\"\" = [\"a\"]}", "{a = {b = [\"c\"]}}", "{a = [5]}"})
    EXPECT_HAS(failure(kLeast, {std::string("data.eval=") + wrong}), "or a table of such lists") << wrong;
}

TEST(Config, TrackersAreAListOrOneWord) {
  const auto to = [](const std::string& value) {
    return parse_config(kLeast, "c.toml", {"log.to=" + value}).log.to;
  };
  EXPECT_EQ(to("wandb"), std::vector<LogTarget>{LogTarget::kWandb});
  EXPECT_EQ(to("[\"mlflow\", \"tensorboard\"]"),
            (std::vector<LogTarget>{LogTarget::kMlflow, LogTarget::kTensorboard}));
  EXPECT_TRUE(to("[]").empty());
  EXPECT_HAS(failure(kLeast, {"log.to=[\"wandb\", \"mlfow\"]"}),
             "expected a list of \"tensorboard\", \"wandb\", \"mlflow\", \"trackio\"");
  EXPECT_HAS(failure(kLeast, {"log.to=[\"wandb\", \"mlfow\"]"}), "did you mean \"mlflow\"?");
}

TEST(Config, AKeyThatWasReplacedIsAnsweredWithWhatToType) {
  EXPECT_HAS(failure(kLeast, {"log.tensorboard=true"}), "did you mean `log.to = [\"tensorboard\"]`?");
  EXPECT_TRUE(parse_config(std::string(kLeast) + "[log]\ntensorboard = false\n", "c.toml").log.to.empty());
}

TEST(Config, AWebhookIsAnAddress) {
  EXPECT_EQ(parse_config(kLeast, "c.toml", {"log.webhook=https://h/x"}).log.webhook, "https://h/x");
  for (const char* wrong : {"h", "ftp://h", "https://", "file:///etc/passwd", "https://h/a b"})
    EXPECT_HAS(failure(kLeast, {std::string("log.webhook=") + wrong}), "it begins with https:// or http://");
}

TEST(Config, PrometheusGetsANumericAddressOrAFile) {
  for (const char* good : {"127.0.0.1:9400", "[::]:0", "run.prom", "/var/lib/a:b.prom"})
    EXPECT_EQ(parse_config(kLeast, "c.toml", {std::string("log.prometheus=") + good}).log.prometheus, good);
  EXPECT_HAS(failure(kLeast, {"log.prometheus=localhost:9400"}), "neither a numeric address and a port");
}

TEST(Config, TheCommandAfterACommitNamesAProgram) {
  const auto command = parse_config(kLeast, "c.toml", {R"(checkpoint.on_commit=["cp", "{}"])"}).checkpoint;
  EXPECT_EQ(command.on_commit, (std::vector<std::string>{"cp", "{}"}));
  EXPECT_HAS(failure(kLeast, {R"(checkpoint.on_commit=["{}"])"}), "names no program");
  EXPECT_HAS(failure(kLeast, {R"(checkpoint.on_commit=["", "{}"])"}), "got [the string \"\", ");
}

TEST(Config, WhatIsPrintedReadsBackEqual) {
  Config config = parse_config(kLeast, "c.toml",
                               {"optimizer.lr=3.3333333333333335e-05", "train.epochs=0.1",
                                "optimizer.eps=1e-300", "run.seed=9223372036854775807", "data.packing=true",
                                "train.method=lora", "lora.targets=[q_proj, \"a\\\"b\\\\c\"]",
                                "optimizer.warmup=0.03", "log.to=[\"wandb\", \"tensorboard\"]"});
  config.model.path = "a \"quoted\" \\ path/\xc3\xa9";
  const Config back = parse_config(print_config(config), "printed");
  EXPECT_TRUE(same_config(config, back)) << print_config(config);
  EXPECT_EQ(back.optimizer.lr, config.optimizer.lr);
  EXPECT_EQ(back.model.path, config.model.path);
  EXPECT_EQ(back.run.seed, config.run.seed);
  config.train.micro_batch = 2;
  EXPECT_FALSE(same_config(config, back));
}

}  // namespace
}  // namespace lm
