"""What make nightly runs: results are kept with a fingerprint of the files that they hang on."""

import re
import subprocess

import nightly
import pytest

from course_lib.authoring import ROOT

pytestmark = pytest.mark.launches  # git says what it holds


def result(target, told="passed", of=None):
    return nightly.Result(target, told, "2026-01-02", "torch 2.13.0", "12", of or nightly.fingerprint(target))


def test_the_page_is_read_as_it_was_written(tmp_path):
    results = {target: result(target, "failed") for target in nightly.TOUCHES}
    page = tmp_path / "page.md"
    page.write_text(nightly.written(results))
    assert nightly.read(page) == results


def test_what_passed_with_the_same_files_does_not_run_again():
    results = {target: result(target) for target in nightly.TOUCHES}
    assert nightly.changed(results) == []
    results["test-slurm"] = result("test-slurm", of="0123456789")
    results["test-browser"] = result("test-browser", "failed")
    del results["test-colab"]
    assert set(nightly.changed(results)) == {"test-slurm", "test-browser", "test-colab"}


def test_a_changed_file_changes_the_fingerprint_of_what_hangs_on_it(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path, check=True)

    (tmp_path / "solutions").mkdir()
    prints = []
    git("init", "-q")
    for text in ("1", "2"):
        (tmp_path / "solutions" / "a.ipynb").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", text)
        prints.append([nightly.fingerprint(target, tmp_path) for target in ("test-grading", "test-slurm")])
    assert prints[0][0] != prints[1][0] and prints[0][1] == prints[1][1]


def test_each_target_and_path_is_there_with_its_job_the_site_has_all_its_sources_and_the_page_its_form():
    makefile = (ROOT / "Makefile").read_text()
    for target, paths in nightly.TOUCHES.items():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        assert all((ROOT / path).exists() for path in paths), target
    assert nightly.PAGE.read_text() == nightly.written(nightly.read())
    workflows = [(ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("site", "ci")]
    assert all(f"{path.split('/')[0]}/**" in workflows[0] for path in nightly.TOUCHES["site"])
    jobs = re.search(r"target: \[(.*)\]", workflows[1])[1].split(", ")
    assert set(jobs) == set(nightly.TOUCHES) - {"quick-newer"}


def test_an_unknown_target_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        nightly.main(["test-everything"])
    assert "test-everything: no such target" in capsys.readouterr().err
