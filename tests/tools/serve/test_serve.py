"""`cqwen serve`: OpenAI's protocol with numbers, over real sockets."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.serving import running
from support.tiny import number_writing_lm
from support.words import Words
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.generate.facts import counterfactual

pytest.importorskip("fastapi", reason="pip install 'cqwen-dist[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'cqwen-dist[serve]'")
from cqwen_dist.tools.serve.requests import NEUTRAL, Completion
from cqwen_dist.tools.serve.server import Limits, Server, make_app

CALLED = [
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "price", "arguments": '{"kg": 2.5}'}}]},
    {"role": "assistant", "content": "w4", "reasoning_content": "w5", "refusal": None},
]
PROMPTS = ["w3 w8 99.9 w41 w7", "-12.5", "w60 w2"]


class Talking(Words):
    """With a chat template, as a base's tokenizer has it."""

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"w1": 0}, unk_token="w1")),
        chat_template="{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('who') }}{% endif %}"
        "{{ m.content }} {% endfor %}",
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return number_writing_lm()


@pytest.fixture(scope="module")
def served(model: Any) -> Iterator[Server]:
    server = Server(model, Talking(), "tea", Limits(tokens=64, texts=4, body_bytes=20_000, body_seconds=1.0))
    with running(server) as server.url:  # type: ignore[attr-defined]
        yield server


def post(served: Any, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_clients_choose_among_the_models_of_one_queue(served: Any, model: Any) -> None:
    """`cqwen serve RUN --adapter milk=RUN`."""
    other = number_writing_lm()
    with torch.no_grad():
        other.model.action.cls_bias.add_(torch.linspace(-1, 1, len(other.model.action.cls_bias)))
    server = Server(other, Talking(), "milk", served.limits, served)
    try:
        assert [each["id"] for each in json.loads(urllib.request.urlopen(f"{served.url}/models").read())["data"]] == [
            "tea",
            "milk",
        ]
        wanted = [continue_text(each, Words(), PROMPTS[:1], max_new_tokens=10)[0].text for each in (model, other)]
        assert wanted[0] != wanted[1]
        for name, text in zip(("tea", "milk"), wanted, strict=True):
            _, answer = post(served, "completions", {"prompt": PROMPTS[0], "max_tokens": 10, "model": name})
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        code, answer = post(served, "completions", {"prompt": "w1", "model": "salt"})
        assert (code, answer["error"]["message"]) == (404, "model: found 'salt', allowed: tea, milk")
        assert server.worker is served.worker
    finally:
        del served.named["milk"]


def test_texts_and_numbers_equal_continue_text_and_clients_do_not_mix(served: Any, model: Any) -> None:
    wanted = [continue_text(model, Words(), [prompt], max_new_tokens=10)[0] for prompt in PROMPTS]
    assert any(written.numbers for written in wanted)
    with ThreadPoolExecutor(6) as clients:
        asked = [{"model": "tea", "prompt": prompt, "max_tokens": 10} for prompt in PROMPTS * 4]
        found = list(clients.map(lambda body: post(served, "completions", body), asked))
    for (status, answer), written in zip(found, wanted * 4, strict=True):
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["text"] == written.text
        assert [n["written"] for n in choice["numbers"]] == [n.written for n in written.numbers]
        assert [n["intervals"]["0.9"] for n in choice["numbers"]] == [[*n.intervals["0.9"]] for n in written.numbers]
        assert choice["finish_reason"] == ("length" if written.end == "length" else "stop")
        assert answer["usage"]["completion_tokens"] == len(written.tokens)
    status, both = post(served, "completions", {"prompt": PROMPTS, "max_tokens": 10})
    assert [choice["text"] for choice in both["choices"]] == [written.text for written in wanted]


def test_a_fact_is_answered_as_from_python(served: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"fact": PROMPTS[0], "observed": "w7", "what_if": PROMPTS[2]}
    wanted = counterfactual(model, Words(), **asked)
    status, found = post(served, "counterfactual", asked)
    assert (status, found["words"], found["p"]) == (200, pytest.approx(wanted.words), pytest.approx(wanted.p))
    status, found = post(served, "counterfactual", asked | {"observed": 3.5})
    assert (status, "allowed: a text that the model goes on with a number" in found["error"]["message"]) == (400, True)
    monkeypatch.setattr(served, "model", "an engine of vLLM")
    assert "--engine: found 'vllm', allowed: generate" in post(served, "counterfactual", asked)[1]["error"]["message"]


def test_openais_client_reads_answers_streams_and_chats(served: Any, model: Any) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == ["tea"]
    (wanted,) = continue_text(model, Words(), [PROMPTS[0]], max_new_tokens=24)
    stream = client.completions.create(
        model="tea", prompt=PROMPTS[0], max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    *pieces, end, last = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == wanted.text
    numbers = [number for piece in [*pieces, end] for number in piece.choices[0].numbers]
    assert [number["written"] for number in numbers] == [number.written for number in wanted.numbers]
    assert end.choices[0].finish_reason == ("length" if wanted.end == "length" else "stop")
    assert last.usage.completion_tokens == len(wanted.tokens)

    turns = [{"role": "system", "content": "w3"}, {"role": "user", "content": [{"type": "text", "text": "w8 7"}]}]
    (said,) = continue_text(model, Words(), ["w3 w8 7 "], max_new_tokens=8, begin=False)
    chat = client.chat.completions.create(model="tea", messages=turns, max_completion_tokens=8)
    assert chat.choices[0].message.content == said.text
    spoken = client.chat.completions.create(model="tea", messages=turns, max_tokens=8, stream=True)
    assert "".join(piece.choices[0].delta.content for piece in spoken) == said.text
    held = client.completions.create(model="tea", prompt=PROMPTS[0], max_tokens=4096)
    assert held.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tea", prompt="w3", top_p=2.0)
    assert refused.value.param == "top_p"


def test_a_stop_string_is_in_no_answer_and_in_no_stream(served: Any, model: Any) -> None:
    text = continue_text(model, Words(), [PROMPTS[0]], max_new_tokens=12)[0].text
    several = [text[12:15], "w9 w"]
    for stop in (text[8:9], text[-6:-1], several, "nowhere", *(text[1 : 4 + size] for size in range(8))):
        ends = [text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text]
        body = {"prompt": PROMPTS[0], "max_tokens": 12, "stop": stop}
        (choice,) = post(served, "completions", body)[1]["choices"]
        assert choice["text"] == text[: min(ends, default=None)]
        assert choice["finish_reason"] == ("stop" if ends else "length")
        assert "".join(streamed(served, body)) == choice["text"]


def streamed(served: Any, body: Any) -> Iterator[str]:
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{served.url}/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"prompt": "w3", "max_token": 5}, 400, "max_token: Extra inputs are not permitted"),
        ("completions", {"prompt": ""}, 400, "prompt: found no tokens, allowed: some text"),
        ("completions", {"prompt": "w3", "n": 2, "stream": True}, 400, "one text a stream"),
        ("completions", {"prompt": "w3", "mode": "loud"}, 400, "mode"),
        ("completions", {"prompt": "w3", "logprobs": 3}, 400, "logprobs: found 3, allowed: false, or no such field"),
        ("completions", {"prompt": "w3", "logprobs": 0}, 400, "logprobs: found 0, allowed: false"),
        ("completions", {"prompt": "w3", "logit_bias": {"5": 1}}, 400, "logit_bias: found {'5': 1}, allowed: {}, or"),
        ("completions", {"prompt": "w3", "max_tokens": True}, 400, "max_tokens: found True, allowed: a number"),
        ("chat/completions", {"messages": [], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completion", {}, 404, "POST /v1/chat/completion: Not Found (/docs lists what there is)"),
        ("completions", b"{", 400, "JSON decode error"),
        ("completions", {"prompt": "w3 " * 10_000}, 413, "20,000 bytes"),
        ("chat/completions", {"messages": [{"role": "nobody", "content": "w"}]}, 400, "messages: found 'nobody'"),
        ("chat/completions", {"messages": CALLED}, 400, "without tool calls"),
    ],
)
def test_a_refused_request_says_which_field(served: Any, path: str, body: Any, status: int, said: str) -> None:
    got, answer = post(served, path, body)
    assert got == status
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_fields_that_ask_for_nothing_change_nothing(served: Any) -> None:
    asked = {"prompt": PROMPTS[0], "max_tokens": 9, "seed": 1}
    wanted = post(served, "completions", asked)[1]["choices"]
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert post(served, "completions", {**asked, name: value})[1]["choices"] == wanted, (name, value)
    nothing = dict.fromkeys(("stop", "temperature", "n", "stream", "user", "stream_options", "mode", "digits"))
    assert post(served, "completions", {**asked, **nothing, "temperature": 0})[1]["choices"] == wanted


def test_a_temperature_of_0_is_passed_on_to_the_modes_that_have_one() -> None:
    for mode, passed in ((None, None), ("standard", None), ("causal", 0.0), ("compatible", 0.0), ("ovr", 0.0)):
        assert Completion(prompt="w", temperature=0, mode=mode).options(9).get("temperature") == passed
    greedy = Completion(prompt="w", temperature=0).options(9)
    assert Completion(prompt="w", temperature=0, top_p=1, top_k=5).options(9) == greedy, "clients send both"
    assert Completion(prompt="w", top_p=0.9).options(9)["mode"] == "compatible"
    assert "top_p" not in Completion(prompt="w").options(9)
    mixed = {"mode": {"words": "compatible", "numbers": "individual"}, "word_temperature": 0.5, "temperature": 0}
    assert mixed.items() <= Completion(prompt="w", **mixed).options(9).items()
    assert Completion(prompt="w", max_tokens=100_000).options(9)["max_new_tokens"] == 9


def test_a_slow_body_and_a_client_that_leaves_stop_nobody(served: Any, model: Any) -> None:
    host, port = served.url.removeprefix("http://").removesuffix("/v1").split(":")
    slow = socket.create_connection((host, int(port)))
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    gone = socket.create_connection((host, int(port)))
    body = json.dumps({"prompt": "w3", "max_tokens": 64}).encode()
    gone.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    gone.close()
    status, answer = post(served, "completions", {"prompt": "w3", "max_tokens": 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    slow.settimeout(30)
    assert b"408" in slow.recv(100)
    slow.close()


def test_what_waits_too_long_or_is_too_much_is_refused(model: Any) -> None:
    from starlette.testclient import TestClient

    late = Server(model, Talking(), "tea", Limits(seconds=-1.0))
    with TestClient(make_app(late)) as client:
        answer = client.post("/v1/completions", json={"prompt": "w3"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    full = Server(model, Talking(), "tea", Limits(waiting=0))
    with TestClient(make_app(full)) as client:
        assert client.post("/v1/completions", json={"prompt": "w3"}).status_code == 429
        assert client.get("/health").json() == {"status": "ok", "waiting": 0}
