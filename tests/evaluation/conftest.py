import pytest
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer


@pytest.fixture(scope="session")
def target():
    return tiny_target()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def draft(target):
    return tiny_draft(target)
