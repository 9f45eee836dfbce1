"""Requests made from the gateway's own OpenAPI, right and wrong: each has an answer that it names, and never a 500."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from gateway_house import CALLS, House, gateway
from gateway_status import document as status
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from spark_gateway.openapi import document

Start = Callable[..., Any]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(status=status(), plan=lambda ask: CALLS), aliases=frozenset("*")) as made:
        yield made


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_every_request_has_an_answer_that_the_document_names(house: House, operation: Any) -> None:
    short = settings(
        max_examples=10,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )

    @short
    @operation_given(operation)
    def one(case: Any) -> None:
        case.call_and_validate(base_url=house.url, checks=CHECKS, timeout=60)

    one()


def operation_given(operation: Any) -> Callable[[Any], Any]:
    from hypothesis import given
    from schemathesis.generation import GenerationMode

    modes = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]
    return given(case=st.one_of(modes))
