"""The examples that use the demo model run: the notebook, structured output, mlx-lm's loop and its server."""

from __future__ import annotations

import json
import re
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
    # mlx-lm leaves out the space that a text begins with.
    assert run("mlx_lm_generate.py").strip() == wanted.strip()


@pytest.fixture
def server():
    pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "mlx_lm_server.py", "demo", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


def ask(server, messages, **options):
    body = json.dumps({"messages": messages, "max_tokens": 12, "temperature": 0, **options}).encode()
    request = urllib.request.Request(f"{server}/v1/chat/completions", body, {"Content-Type": "application/json"})
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read().decode()
        except ConnectionRefusedError:
            time.sleep(0.5)
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
