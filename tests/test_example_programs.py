"""The examples that use the demo model run: the notebook, structured output, mlx-lm's loop and its server."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import mlx_ttd

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOK = EXAMPLES / "demo.ipynb"
SERVED_CONTEXT = 128


def run(name, *arguments):
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def images(cells):
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_structured_output_is_one_of_the_choices():
    assert run("structured_output.py").strip() in ("{'name': 'Earth'}", "{'name': 'Seas'}", "{'name': 'Heaven'}")


def test_the_notebook_is_stored_as_it_ran():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert images(cells) == 2
    assert NOTEBOOK.stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs():
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert images(notebook.cells) == 2


@pytest.mark.oracle
def test_mlx_lm_generates_as_the_package_does():
    pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    with mlx_ttd.load("demo", "300MB") as llm:
        wanted = llm.generate("In the beginning", max_tokens=60).text
    assert run("mlx_lm_generate.py") == wanted + "\n"


@pytest.mark.oracle
def test_the_models_tokenizer_serves_mlx_lm():
    mlx_lm = pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    wrapper = pytest.importorskip("mlx_lm.tokenizer_utils", reason="needs the oracle extra").TokenizerWrapper
    question = [{"role": "user", "content": "Genesis 1:1"}]
    with mlx_ttd.load("demo", "300MB") as llm:
        theirs = mlx_lm.generate(llm.model, llm.tokenizer, prompt="In the beginning", max_tokens=30)
        assert theirs == llm.generate("In the beginning", max_tokens=30).text
        wrapped = wrapper(llm.tokenizer)
        asked = wrapped.apply_chat_template(question, add_generation_prompt=True, enable_thinking=False)
        assert asked == llm.encode(question, enable_thinking=False)
        assert wrapped.has_thinking
        assert wrapped.has_chat_template
        assert wrapped.eos_token_ids == {llm.tokenizer.token_id("<|im_end|>")}
        wrapped.add_eos_token("<|endoftext|>")
        assert len(wrapped.eos_token_ids) == 2
        assert wrapped.convert_ids_to_tokens([0, 2043]) == ["!", "<|im_end|>"]
        assert wrapped.batch_decode([asked[-2:], [0]]) == [llm.tokenizer.decode(asked[-2:]), "!"]


@pytest.mark.oracle
def test_the_examples_end_at_every_end_token(monkeypatch, capsys):
    mlx_lm = pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    tokenizers = []

    def noted(model, tokenizer, *arguments, **options):
        tokenizers.append(tokenizer)
        return iter(())

    monkeypatch.setattr(mlx_lm, "stream_generate", noted)
    runpy.run_path(str(EXAMPLES / "mlx_lm_generate.py"))["main"]("demo")
    server = runpy.run_path(str(EXAMPLES / "mlx_lm_server.py"))
    served = server["server"]
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(served, "main", lambda: tokenizers.append(served.load("demo")[1]))
    server["main"]("demo")
    assert [tokenizer.eos_token_ids for tokenizer in tokenizers] == [{2041, 2043}] * 2


@pytest.fixture
def server():
    pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "mlx_lm_server.py", "demo", "--port", str(port)]
    environment = {**os.environ, "MLX_TTD_CONTEXT": str(SERVED_CONTEXT)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


def ask(server, messages, **options):
    return post(f"{server}/v1/chat/completions", messages=messages, **{"max_tokens": 12, "temperature": 0, **options})


def post(address, **fields):
    request = urllib.request.Request(address, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read().decode()
        except ConnectionRefusedError:
            time.sleep(0.5)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


@pytest.mark.oracle
def test_mlx_lm_serves_a_streamed_model(server):
    question = [{"role": "user", "content": "Genesis 1:1"}]
    with mlx_ttd.load("demo", "300MB") as llm:
        wanted = llm.generate(question, max_tokens=12, template={"enable_thinking": False}).text
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    message = json.loads(ask(server, question, **options))["choices"][0]["message"]
    assert message["content"] == wanted
    more = [*question, {"role": "assistant", "content": wanted}, {"role": "user", "content": "And then?"}]
    assert json.loads(ask(server, more, **options))["choices"][0]["message"]["content"]
    streamed = ask(server, question, stream=True, **options)
    pieces = [json.loads(line) for line in re.findall(r"^data: (\{.*\})$", streamed, re.M)]
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == wanted


@pytest.mark.oracle
@pytest.mark.parametrize("stream", [False, True])
def test_mlx_lms_server_ends_an_answer_where_the_context_does(server, stream):
    answer = ask(server, [{"role": "user", "content": "Genesis 1:1"}], max_tokens=500, stream=stream)
    assert '"finish_reason": "length"' in answer
    text = json.loads(post(f"{server}/v1/completions", prompt="In the beginning", max_tokens=500))
    assert text["choices"][0]["finish_reason"] == "length"
    assert text["usage"]["total_tokens"] == SERVED_CONTEXT
    long = "word " * SERVED_CONTEXT
    for path, prompt in {
        "chat/completions": {"messages": [{"role": "user", "content": long}]},
        "completions": {"prompt": long},
    }.items():
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"{server}/v1/{path}", max_tokens=5, stream=stream, **prompt)
        assert caught.value.code == 400
        assert f"the context holds {SERVED_CONTEXT}" in json.loads(caught.value.read())["error"]
    assert ask(server, [{"role": "user", "content": "Genesis 1:1"}])
