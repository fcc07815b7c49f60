"""Chats: each model's own template, and nothing that a message could forge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidField, UnusableModel
from bridge.models import Model
from bridge.prefix_cache import PrefixCache
from bridge.templates import Chat, Message, render_chat, render_text
from bridge.translation import Rendering
from tests import tiny
from tests.tiny import EXACT_KINDS, SPECIALS, vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] | trim }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

CONTENT = st.lists(
    st.one_of(st.sampled_from([*SPECIALS, "<tu", "rn>", "<", "<eo", "s>", "<<eos>eos>", "\ufdd0"]), st.text(max_size=4))
).map("".join)


def model(kind: str, template: str) -> Model:
    return tiny.model(kind, chat_template=template)


def render(kind: str, template: str, *messages: Message, **variables: object) -> Rendering:
    return render_chat(model(kind, template), Chat(messages, variables))


@pytest.mark.parametrize("kind", EXACT_KINDS)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3), role=CONTENT)
def test_no_content_can_close_a_turn_or_open_one(kind: str, contents: list[str], role: str) -> None:
    words = vocabulary(kind)
    messages = [Message(role, content) for content in contents]
    words.prefixes = PrefixCache()
    rendering = render(kind, TEMPLATE, *messages)
    # The same from what is cached.
    assert render(kind, TEMPLATE, *messages).ids == rendering.ids
    control = [id_ for id_ in rendering.ids if id_ in words.special]
    # One beginning of text, each message opened and closed once, and the assistant's turn opened.
    assert control == [1, *[3, 2] * len(messages), 3]
    assert words.spell(rendering.ids).endswith(b"assistant\n")
    for content in contents:
        assert content.strip().encode() in words.spell(rendering.ids)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_an_honest_chat_has_the_ids_of_its_rendered_text(kind: str) -> None:
    rendering = render(kind, TEMPLATE, Message("user", "the dog"))
    assert list(rendering.ids) == tiny.own_ids(kind, "<bos><turn>user\nthe dog<eos>\n<turn>assistant\n", framed=False)
    assert rendering.text == b"assistant\n"
    assert rendering.ids[rendering.settled - 1] == 3


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_a_model_without_a_template_gets_a_transcript(kind: str) -> None:
    words = vocabulary(kind)
    rendering = render(kind, "", Message("user", "hello <eos>"))
    assert words.spell(rendering.ids).lstrip(b" ") == b"User: hello <eos>\n\nAssistant:"
    assert 2 not in rendering.ids


def test_a_template_can_refuse_a_chat_and_cannot_reach_out() -> None:
    with pytest.raises(InvalidField, match="only one"):
        render("byte_level", "{{ raise_exception('only one') }}", Message("user", "x"))
    with pytest.raises(UnusableModel):
        render("byte_level", "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", Message("user", "x"))


def test_a_template_may_use_what_templates_of_the_hub_use() -> None:
    words = vocabulary("byte_level")
    template = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}"
        "{{ message['content'] }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    rendering = render("byte_level", template, Message("user", "a"), Message("user", "b"))
    assert words.spell(rendering.ids) == b"a4"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{% nothing %}", "{{ x.y.z }}"])
def test_a_broken_template_is_the_models_fault(template: str) -> None:
    with pytest.raises(UnusableModel, match="chat template failed"):
        render("byte_level", template, Message("user", "a"))


def test_control_tokens_in_a_prompt_are_understood() -> None:
    words = vocabulary("byte_level")
    rendering = render_text(words, "<turn>user\nhi")
    assert rendering.ids[0] == 3
    assert rendering.text == b"user\nhi"
