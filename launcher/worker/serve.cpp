// `lmlaunch serve`: OpenAI's completions and chat completions over HTTP. The main thread computes; a thread
// for each connection reads requests and writes answers.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "base/file.h"
#include "base/log.h"
#include "launcher/serve/http_server.h"
#include "launcher/worker/serve_engine.h"
#include "launcher/worker/worker_commands.h"

namespace lm {
namespace {

constexpr int64_t kDefaultPort = 8000, kDefaultContext = 4096, kLargestPort = 65535;
constexpr size_t kShortestToken = 16;

volatile std::sig_atomic_t stop_signals = 0;

void on_stop(int) {
  stop_signals = stop_signals + 1;
}

void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

struct Access {
  std::string address;
  int port = 0;
  std::string token;  // "": none is wanted
};

[[noreturn]] void refuse_flag(const std::string& what, const std::string& next) {
  throw usage_error(what, next);
}

Access access_of(const CommandLine& line) {
  Access out;
  out.address = line.value("--host").value_or("127.0.0.1");
  if (out.address == "localhost") out.address = "127.0.0.1";
  const int64_t port = line.integer("--port").value_or(kDefaultPort);
  if (port > kLargestPort)
    refuse_flag(fmt::format("--port: expected 0 to {}, got {}", kLargestPort, port),
                "see `lmlaunch serve --help`");
  out.port = static_cast<int>(port);
  if (const auto file = line.value("--token-file")) {
    constexpr int64_t kMostBytes = 4096;
    out.token = read_small_file(*file, kMostBytes);
    while (!out.token.empty() && (out.token.back() == '\n' || out.token.back() == '\r')) out.token.pop_back();
    const auto printed = [](char c) { return c > 0x20 && c < 0x7f; };
    if (out.token.size() < kShortestToken || !std::ranges::all_of(out.token, printed))
      refuse_flag(fmt::format("--token-file: {} is no line of {} or more printed characters without blanks",
                              *file, kShortestToken),
                  "write one: openssl rand -hex 32 > " + *file);
  } else if (!is_loopback(out.address)) {
    refuse_flag("--host " + out.address + ": anyone who reaches this address could use the model",
                "name a file with a token: --token-file FILE, or leave --host out");
  }
  return out;
}

// The last part of its path.
std::string served_name(const std::string& subject) {
  std::filesystem::path path = std::filesystem::path(subject).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().empty() || path.filename() == "." ? "model" : path.filename().string();
}

class Service {
 public:
  Service(ServeEngine& engine, const Access& access, std::string model, int64_t vocab)
      : engine_(engine),
        access_(access),
        model_(std::move(model)),
        vocab_(vocab),
        started_(static_cast<int64_t>(std::time(nullptr))) {}

  // Any connection's thread.
  void handle(const HttpRequest& request, HttpReply& reply) {
    if (request.path == "/health") return allow(request, "GET"), reply.send(200, R"({"status":"ok"})");
    check_access(request);
    if (request.path == "/v1/models")
      return allow(request, "GET"), reply.send(200, openai_models(model_, started_));
    if (request.path == "/v1/models/" + model_)
      return allow(request, "GET"), reply.send(200, openai_model(model_, started_));
    const bool chat = request.path == "/v1/chat/completions";
    if (!chat && request.path != "/v1/completions") throw HttpFault(404, "there is no " + request.path);
    allow(request, "POST");
    // Browsers send other types from any page without asking the server before.
    if (!request.header("content-type").starts_with("application/json"))
      throw HttpFault(415, "Content-Type must be application/json");
    try {
      answer(std::make_shared<const OpenAiRequest>(parse_openai_request(request.body, chat, model_, vocab_)),
             reply);
    } catch (const BadRequest& why) {
      reply.send(why.status, openai_error(why.status, why.what(), why.param));
    }
  }

 private:
  static void allow(const HttpRequest& request, const char* method) {
    if (request.method != method)
      throw HttpFault(405, fmt::format("{} takes {} alone", request.path, method));
  }

  void check_access(const HttpRequest& request) const {
    if (!access_.token.empty()) {
      if (!same(request.header("authorization"), "Bearer " + access_.token))
        throw HttpFault(401, "the bearer token is missing or wrong");
      return;
    }
    // Without a token a page of another site, whose name resolves to this machine, must not reach the model.
    std::string host = request.header("host");
    if (const size_t port = host.rfind(':'); port != std::string::npos && !host.ends_with(']'))
      host.resize(port);
    if (host != "localhost" && host != "[::1]" && !host.starts_with("127."))
      throw HttpFault(403, "the header host names another machine");
  }

  // Takes the same time wherever they differ.
  static bool same(const std::string& given, const std::string& wanted) {
    unsigned difference = given.size() != wanted.size() ? 1U : 0U;
    for (size_t i = 0; i < given.size(); ++i)
      difference |= static_cast<unsigned>(static_cast<unsigned char>(given[i])) ^
                    static_cast<unsigned char>(wanted[i % wanted.size()]);
    return difference == 0;
  }

  void answer(const std::shared_ptr<const OpenAiRequest>& request, HttpReply& reply) {
    const auto mail = std::make_shared<Mailbox>();
    OpenAiAnswer answer(request->chat, request->logprobs.has_value(), model_,
                        static_cast<int64_t>(std::time(nullptr)));
    engine_.submit(request, mail);
    try {
      request->stream ? stream(*request, *mail, answer, reply) : whole(*request, *mail, answer, reply);
    } catch (...) {
      mail->abandon();
      throw;
    }
  }

  // The next part, once it has come. Nothing: the client has gone.
  static std::optional<ServePart> wait(Mailbox& mail, HttpReply& reply) {
    while (!reply.gone()) {
      if (std::optional<ServePart> part = mail.take()) {
        if (part->refusal) throw BadRequest(*part->refusal);
        return part;
      }
    }
    mail.abandon();
    return std::nullopt;
  }

  static void add(Usage& sum, const Usage& more) {
    sum.prompt_tokens += more.prompt_tokens;
    sum.completion_tokens += more.completion_tokens;
  }

  static void whole(const OpenAiRequest& request, Mailbox& mail, const OpenAiAnswer& answer,
                    HttpReply& reply) {
    std::vector<AnswerPart> choices(request.prompts.size());
    Usage usage;
    for (size_t ended = 0; ended < choices.size();) {
      const std::optional<ServePart> part = wait(mail, reply);
      if (!part) return;
      AnswerPart& choice = choices[static_cast<size_t>(part->answer.index)];
      choice.index = part->answer.index;
      choice.text += part->answer.text;
      choice.scores.insert(choice.scores.end(), part->answer.scores.begin(), part->answer.scores.end());
      choice.finish_reason = part->answer.finish_reason;
      add(usage, part->usage);
      ended += choice.finish_reason.empty() ? 0 : 1;
    }
    reply.send(200, answer.whole(choices, usage));
  }

  static void stream(const OpenAiRequest& request, Mailbox& mail, OpenAiAnswer& answer, HttpReply& reply) {
    Usage usage;
    for (size_t ended = 0; ended < request.prompts.size();) {
      std::optional<ServePart> part;
      try {
        part = wait(mail, reply);
      } catch (const BadRequest& why) {
        if (!reply.begun()) throw;
        mail.abandon();
        reply.event(openai_error(why.status, why.what(), why.param));
        return reply.end_stream();
      }
      if (!part) return;
      // The status can only tell of a refusal before the stream begins.
      if (!reply.begun()) {
        reply.begin_stream();
        if (request.chat) reply.event(answer.role_part());
      }
      reply.event(answer.part(part->answer));
      add(usage, part->usage);
      ended += part->answer.finish_reason.empty() ? 0 : 1;
    }
    if (request.include_usage) reply.event(answer.usage_part(usage));
    reply.event("[DONE]");
    reply.end_stream();
  }

  ServeEngine& engine_;
  const Access& access_;
  std::string model_;
  int64_t vocab_, started_;
};

std::unique_ptr<HttpServer> listen(const Access& access, Service& service) {
  try {
    return std::make_unique<HttpServer>(
        access.address, access.port, HttpLimits{},
        [&](const HttpRequest& request, HttpReply& reply) { service.handle(request, reply); },
        [](const HttpFault& fault) { return HttpBody{openai_error(fault.status, fault.what())}; });
  } catch (const CannotListen& failure) {
    throw Error(Exit::kConfig, {.area = "SERVE-10",
                                .what = failure.what(),
                                .place = "the command line",
                                .next = "choose another --port or --host"});
  }
}

}  // namespace

Exit serve_command(const CommandLine& line) {
  const Access access = access_of(line);  // report mistakes before anything is loaded
  const int64_t together = texts_together(line);
  catch_stop_signals();
  ChatPrompt chat_prompt(line);
  const int64_t most = chat_prompt.spec().max_positions;
  const int64_t context = std::max<int64_t>(
      line.integer("--context").value_or(most > 0 ? std::min(most, kDefaultContext) : kDefaultContext), 2);
  // Two at least: log-probabilities of a prompt take the memory of several texts' logits.
  chat_prompt.load(context, std::max<int64_t>(together, 2));
  ServeEngine engine(chat_prompt, context);
  const std::string model = served_name(line.positional[0]);
  Service service(engine, access, model, chat_prompt.spec().vocab);
  const std::unique_ptr<HttpServer> server = listen(access, service);
  const bool six = access.address.find(':') != std::string::npos;
  std::printf("serving %s on http://%s%s%s:%d/v1\n", model.c_str(), six ? "[" : "", access.address.c_str(),
              six ? "]" : "", server->port());
  std::fflush(stdout);
  engine.run([] { return stop_signals > 0; });
  log_line("stopped by a signal");
  return Exit::kDone;
}

}  // namespace lm
