"""`lmlaunch serve`: OpenAI's requests over HTTP, against transformers and against what the same model does alone; what is refused; and
OpenAI's package and lm-evaluation-harness as clients. Other requests are written by hand."""

import concurrent.futures
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess

import openai
import peft
import pytest
import tokenizers
import torch
from counts import FULL
from test_run import BIN, config, lmlaunch
from test_try_it import work  # noqa: F401 (a fixture)
from transformers import AutoModelForCausalLM

SETTINGS = ["--port", "0", "--gpus", "0", "model.dtype=fp32"]


class Server:
    def __init__(self, work, *more, model="model"):  # noqa: F811
        self.process = subprocess.Popen([BIN / "lmlaunch", "serve", model, *SETTINGS, *more], cwd=work, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("serving "), self.process.communicate(timeout=60)[1]
        self.port = int(line.rsplit(":", 1)[1].split("/")[0])

    def ask(self, path, body=None, method=None, **headers):
        """(status, object) of a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, json.loads(text)

    def good(self, path, body=None):
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def completion(self, prompt, **keys):
        return self.good("/v1/completions", {"prompt": prompt, "temperature": 0, **keys})

    def stream(self, path, body):
        """The objects of a stream, and whether it ended as it must."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200 and reply.getheader("Content-Type") == "text/event-stream"
        events = [event.removeprefix("data: ") for event in reply.read().decode().split("\n\n") if event]
        connection.close()
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        stderr = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, stderr
        return stderr


@pytest.fixture(scope="module")
def server(work):  # noqa: F811
    server = Server(work, "--batch", "4")
    yield server
    assert "stopped by a signal" in server.end()


@pytest.fixture(scope="module")
def theirs(work):  # noqa: F811
    return AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)


def tokens_of(work, text):  # noqa: F811
    return tokenizers.Tokenizer.from_file(str(work / "model" / "tokenizer.json")).encode(text).ids


def logprobs_of(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def test_greedy_answers_are_those_of_transformers(server, work, theirs):  # noqa: F811
    ids = tokens_of(work, "hello there")
    for prompt in ("hello there", ids):
        answer = server.completion(prompt, max_tokens=12, logprobs=0)
        [choice] = answer["choices"]
        told = tokens_of(work, "".join(choice["logprobs"]["tokens"]))
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=3, pad_token_id=3)[0, len(ids):].tolist()
        assert told == [token for token in expected if token != 3]
        assert choice["finish_reason"] == ("stop" if 3 in expected else "length")
        assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": len(told), "total_tokens": len(ids) + len(told)}


def test_echoed_prompts_have_the_log_probabilities_of_transformers(server, work, theirs):  # noqa: F811
    """As lm-evaluation-harness asks: a prompt of more than one part, scored, and one token more."""
    ids = (tokens_of(work, "hello there, who goes on for longer") * 2)[:50]
    [choice] = server.completion([ids], max_tokens=1, echo=True, logprobs=2)["choices"]
    expected = logprobs_of(theirs, ids)
    scores = choice["logprobs"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None and scores["text_offset"][0] == 0
    of_prompt = torch.tensor([expected[i, token] for i, token in enumerate(ids[1:])])
    assert len(scores["tokens"]) in (len(ids), len(ids) + 1)  # the token after it may end the answer
    assert (torch.tensor(scores["token_logprobs"][1:len(ids)]).double() - of_prompt).abs().max() < 1e-4
    for place, top in enumerate(scores["top_logprobs"][1:len(ids)]):
        best = expected[place].max().item()
        assert abs(max(top.values()) - best) < 1e-4 and 2 <= len(top) <= 3
    assert choice["text"].startswith("".join(scores["tokens"][:len(ids)])[:5])
    [scored] = server.completion(ids, max_tokens=0, echo=True, logprobs=0)["choices"]
    assert scored["logprobs"]["token_logprobs"] == scores["token_logprobs"][:len(ids)]


def test_answers_together_are_the_answers_alone(server):
    """Seven prompts of different lengths in four places; and several clients at once."""
    prompts = ["hello", "ab", "who are you then", "x" * 30, "hello there", "zy", "hello"]
    together = server.completion(prompts, max_tokens=16)["choices"]
    assert [choice["index"] for choice in together] == list(range(len(prompts)))
    alone = [server.completion(prompt, max_tokens=16)["choices"][0]["text"] for prompt in prompts]
    assert [choice["text"] for choice in together] == alone and len(set(alone)) > 3
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        at_once = list(threads.map(lambda prompt: server.completion(prompt, max_tokens=16)["choices"][0]["text"], prompts))
    assert at_once == alone


def test_a_stream_has_the_text_of_the_answer(server):
    body = {"prompt": ["hello", "who are you"], "max_tokens": 10, "temperature": 0, "logprobs": 1, "stream_options": {"include_usage": True}}
    *parts, usage = server.stream("/v1/completions", body)
    whole = server.completion(body["prompt"], max_tokens=10, logprobs=1)
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"] and len(mine) > 3
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for key, values in choice["logprobs"].items():
            assert sum((part["logprobs"][key] for part in mine if part["logprobs"]), []) == values, key
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]


def test_chats_are_written_with_the_template(server, work):  # noqa: F811
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "model": "model", "logprobs": True, "top_logprobs": 2}
    answer = server.good("/v1/chat/completions", body)
    [choice] = answer["choices"]
    written = server.completion("<system>be brief<user>hello<assistant>", max_tokens=8)
    assert choice["message"] == {"role": "assistant", "content": written["choices"][0]["text"]}
    assert answer["usage"] == written["usage"] and answer["object"] == "chat.completion"
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2] * answer["usage"]["completion_tokens"]
    alone = json.loads(lmlaunch("generate", "model", "--prompt", "hello", "--system", "be brief", "--max-tokens", "8", "--json", "--gpus", "0",
                                "model.dtype=fp32", cwd=work).stdout)
    assert alone["text"] == choice["message"]["content"]
    parts = server.stream("/v1/chat/completions", body)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""} and parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


def test_an_answer_ends_before_a_stop_string(server):
    text = server.completion("hello there", max_tokens=12)["choices"][0]["text"]
    for begin, length in ((3, 1), (2, 3), (5, 2)):
        stop = text[begin:begin + length]
        expected = text[:text.index(stop)]
        for keys in ({"stop": stop}, {"stop": ["never there", stop]}):
            [choice] = server.completion("hello there", max_tokens=12, **keys)["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        parts = server.stream("/v1/completions", {"prompt": "hello there", "temperature": 0, "max_tokens": 12, "stop": stop})
        assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_a_seed_decides_what_is_drawn(server):
    def drawn(prompt="hello", **keys):
        return server.completion(prompt, **{"temperature": 1.5, "max_tokens": 12, **keys})["choices"][0]["text"]

    assert drawn(seed=5) == drawn(seed=5) != drawn(seed=6)
    assert len({drawn() for _ in range(4)}) > 1
    assert drawn(top_p=1e-6) == drawn(top_k=1) == drawn(temperature=0)


BAD = [
    ("{", None), ("[]", None), ({"prompt": "a", "prompt_": 1}, "prompt_"), ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": [[97]]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": "a", "n": 2}, "n"), ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 64}, "prompt"), ({"prompt": "a" * 65}, "prompt"), ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"), ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stream": 1}, "stream"), ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"), ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "stream": True, "max_tokens": 64}, "prompt"),
]


@pytest.mark.parametrize("body, param", BAD, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_refused_with_its_reason(server, body, param):
    status, answer = server.ask("/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error" and answer["error"]["param"] == param, answer
    assert answer["error"]["message"]


def test_a_request_elsewhere_or_of_another_kind_is_refused(server):
    assert server.ask("/health")[0] == 200 and server.ask("/v1/models")[1]["data"][0]["id"] == "model"
    assert server.ask("/v1/models/model")[1]["object"] == "model"
    assert server.ask("/v2/models")[0] == 404 and server.ask("/v1/completions")[0] == 405
    assert server.ask("/v1/completions", "{}", Content_Type="text/plain")[0] == 415
    status, answer = server.ask("/v1/completions", {"prompt": "a", "model": "other"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert server.ask("/v1/models", Host="elsewhere.example")[0] == 403
    bad = [[], [{"role": "tool", "content": "a"}], [{"role": "user"}], [{"role": "assistant", "content": "a"}], "a", None]
    assert {server.ask("/v1/chat/completions", {"messages": messages})[0] for messages in bad} == {400}


RAW = [
    (b"GET /health HTTP/1.1\r\n\r\n", b"400"),  # without Host
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", b"400"),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"501"),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 20000 + b"\r\n\r\n", b"431"),
    (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", b"505"), (b"\x16\x03\x01\r\n\r\n", b"400"),
]


@pytest.mark.parametrize("sent, status", RAW, ids=lambda value: str(value)[:30])
def test_what_is_no_request_of_http_is_refused(server, sent, status):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert b'"invalid_request_error"' in answer or status == b"501" or status == b"505"


def test_a_connection_takes_one_request_after_another(server):
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request + request.replace(b"Host", b"Connection: close\r\nHost"))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.count(b'{"status":"ok"}') == 2


def test_a_client_that_leaves_frees_its_place(server):
    for _ in range(6):  # more than there are places
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            body = json.dumps({"prompt": "hello", "max_tokens": 59, "stream": True}).encode()
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                               % (len(body), body))
            assert connection.recv(12) == b"HTTP/1.1 200"
    assert server.completion("hello", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_token_is_wanted_where_others_reach_the_server(work):  # noqa: F811
    done = lmlaunch("serve", "model", "--host", "0.0.0.0", cwd=work, check=False)
    assert done.returncode == 2 and "--token-file" in done.stderr
    (work / "short.txt").write_text("short\n")
    assert lmlaunch("serve", "model", "--token-file", "short.txt", cwd=work, check=False).returncode == 2
    (work / "token.txt").write_text("0123456789abcdef\n")
    server = Server(work, "--host", "0.0.0.0", "--token-file", "token.txt")
    assert server.ask("/health")[0] == 200
    for header in ({}, {"Authorization": "Bearer 0123456789abcdeg"}, {"Authorization": "Bearer 0123456789abcdef0"}):
        status, answer = server.ask("/v1/models", **header)
        assert status == 401 and answer["error"]["type"] == "authentication_error"
    assert server.ask("/v1/models", Authorization="Bearer 0123456789abcdef", Host="elsewhere.example")[0] == 200
    server.end()


def test_an_adapter_of_a_run_is_served_and_the_run_is_not_locked(work):  # noqa: F811
    settings = dict(train__method="lora", checkpoint__every=2)
    lmlaunch(config(work, "served", train__steps=4, **settings), cwd=work)
    server = Server(work, model="runs/served")
    expected = json.loads(lmlaunch("generate", "runs/served", "--prompt", "ab", "--max-tokens", "8", "--json", "--gpus", "0", "model.dtype=fp32",
                                   cwd=work).stdout)
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "temperature": 0, "model": "served"}
    assert server.good("/v1/chat/completions", body)["choices"][0]["message"]["content"] == expected["text"]
    lmlaunch(config(work, "served", train__steps=6, **settings), cwd=work)  # takes the run's lock
    server.end()


def test_openais_package_drives_it(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0, timeout=120)
    [model] = client.models.list().data
    asked = {"model": model.id, "max_tokens": 8, "temperature": 0}
    written = server.completion("hello there", max_tokens=8, logprobs=1)
    answer = client.completions.create(prompt="hello there", logprobs=1, **asked)
    assert answer.choices[0].text == written["choices"][0]["text"] and answer.usage.model_dump(include=set(written["usage"])) == written["usage"]
    assert answer.choices[0].logprobs.token_logprobs == written["choices"][0]["logprobs"]["token_logprobs"]
    parts = list(client.completions.create(prompt="hello there", stream=True, **asked))
    assert len(parts) > 3 and "".join(part.choices[0].text for part in parts) == answer.choices[0].text
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    said = client.chat.completions.create(messages=messages, **asked).choices[0]
    told = server.good("/v1/chat/completions", {"messages": messages, **asked})["choices"][0]
    assert (said.message.content, said.finish_reason) == (told["message"]["content"], told["finish_reason"])
    deltas = [part.choices[0].delta.content or "" for part in client.chat.completions.create(messages=messages, stream=True, **asked)]
    assert "".join(deltas) == said.message.content
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="hello", n=2, **asked)
    assert refused.value.param == "n"


@pytest.mark.skipif(not FULL or importlib.util.find_spec("lm_eval") is None, reason="--full, with lm_eval 0.4.13 installed")
def test_lm_evaluation_harness_has_the_accuracy_of_eval(work, tmp_path):  # noqa: F811
    """HellaSwag's form of choices, scored by the harness over HTTP and by `eval` itself."""
    import lm_eval
    from test_try_it import choice_rows
    rows = list(choice_rows(torch.Generator().manual_seed(4), 40))
    (work / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = json.loads(lmlaunch("eval", "model", 'data.eval=["choices.jsonl"]', "data.max_length=64", "data.cache_dir=cache", "model.dtype=fp32",
                               "--json", "--gpus", "0", cwd=work).stdout)
    (tmp_path / "tiny.yaml").write_text(json.dumps({
        "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / "choices.jsonl")}}, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{endings}}", "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}))
    server = Server(work, "--context", "64")
    result = lm_eval.simple_evaluate(
        model="local-completions", tasks=["tiny"], task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
        model_args={"model": "model", "base_url": f"http://127.0.0.1:{server.port}/v1/completions", "tokenizer": str(work / "model"),
                    "tokenizer_backend": "huggingface", "max_length": 60, "num_concurrent": 2})["results"]["tiny"]
    server.end()
    assert (result["acc,none"], result["acc_norm,none"]) == (ours["accuracy"], ours["accuracy_norm"])


WEIGHTS = ["adapters/a@0.7", "adapters/b@-0.5"]


@pytest.fixture(scope="module")
def adapters(work):  # noqa: F811
    """peft's, of random values, in adapters/a and adapters/b; and the model with both, in double."""
    torch.manual_seed(5)
    keys = dict(task_type="CAUSAL_LM", init_lora_weights=False, r=4)
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    both = peft.get_peft_model(model, peft.LoraConfig(**keys, lora_alpha=6, target_modules="all-linear"), adapter_name="a")
    both.add_adapter("b", peft.LoraConfig(**keys, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "v_proj"]))
    both.save_pretrained(work / "adapters")
    return both.double().eval()


def test_merged_adapters_are_pefts(work, adapters):  # noqa: F811
    for how, rank in {"cat": 8, "svd": 3, "linear": 4}.items():
        more = ["--rank", "3"] if how == "svd" else []
        done = lmlaunch("merge", *WEIGHTS, "--type", how, *more, "-o", f"as_{how}", "--json", cwd=work)
        assert json.loads(done.stdout)["r"] == rank
        adapters.add_weighted_adapter(["a", "b"], [0.7, -0.5], how, combination_type=how, svd_rank=3)
        adapters.load_adapter(work / f"as_{how}", f"our_{how}")
        modules = [module for module in adapters.modules() if how in getattr(module, "lora_A", {})]
        assert len(modules) == 7 * 2
        for module in modules:
            theirs, ours = (module.get_delta_weight(name).double() for name in (how, f"our_{how}"))  # noqa: F811
            assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_several_adapters_are_their_weighted_sum(work, adapters):  # noqa: F811
    adapters.add_weighted_adapter(["a", "b"], [0.7, -0.5], "sum", combination_type="cat")
    adapters.set_adapter("sum")
    ids = tokens_of(work, "hello there")
    expected = logprobs_of(adapters, ids)
    (work / "scratch").mkdir()
    server = Server(work, *[word for name in WEIGHTS for word in ("--adapter", name)])
    [choice] = server.completion(ids, max_tokens=0, echo=True, logprobs=0)["choices"]
    server.end()
    told = torch.tensor(choice["logprobs"]["token_logprobs"][1:]).double()
    expected = torch.tensor([expected[i, token] for i, token in enumerate(ids[1:])])
    assert (told - expected).abs().max() < 1e-5 * expected.abs().max()
    # One alone is taken as it is, and nothing is left of the combined ones.
    say = lambda *words, **more: json.loads(lmlaunch("generate", *words, "--prompt", "ab", "--max-tokens", "8", "--json", "--gpus", "0",  # noqa: E731
                                                     "model.dtype=fp32", cwd=work, **more).stdout)["tokens"]
    assert say("model", "--adapter", "adapters/a") == say("adapters/a")
    beside = [word for name in WEIGHTS for word in ("--adapter", name)]
    assert say("model", *beside, env={**os.environ, "TMPDIR": str(work / "scratch")}) is not None
    assert list((work / "scratch").iterdir()) == []


def test_adapters_that_do_not_belong_together_are_refused(work, adapters):  # noqa: F811
    shutil.copytree(work / "model", work / "copy")
    shutil.copytree(work / "adapters" / "b", work / "of_copy")
    file = work / "of_copy" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(work / "copy")}))
    merge = lambda *words: lmlaunch("merge", *words, "-o", "together", cwd=work, check=False)  # noqa: E731
    other = merge("adapters/a", "of_copy")
    assert other.returncode == 11 and "different base models" in other.stderr and "--base DIR" in other.stderr, other.stderr
    assert not (work / "together").exists()
    assert merge("adapters/a", "of_copy", "--base", "copy").returncode == 0
    for words, said in ((["adapters/a@much"], "is no number"), (["model"], "is no adapter"), (["adapters/a", "--rank", "2"], "--rank is for --type svd")):
        done = merge(*words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    done = lmlaunch("generate", "adapters/a", "--adapter", "adapters/b", "--prompt", "x", cwd=work, check=False)
    assert done.returncode == 2 and "the first argument is an adapter" in done.stderr, done.stderr
