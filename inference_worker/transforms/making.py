"""From transforms as a document names them to the transforms themselves: every type there is, and no other.

Each reads its own parameters; what is wrong is noted with its place, what is there and what is accepted.
"""

from collections.abc import Sequence
from typing import assert_never, cast

from inference_worker.config.documents import AnswerTransformConfig, ProcessDocuments, TransformConfig
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import Extensions, TransformParts
from inference_worker.gates.parameters import Parameters
from inference_worker.transforms.chain import AnswerTransform, BodyTransform, Transforms
from inference_worker.transforms.gcs_uri import GcsUriMultipart
from inference_worker.transforms.guarded import GuardedAnswerTransform, GuardedBodyTransform
from inference_worker.transforms.model_name import ModelName
from inference_worker.transforms.multipart import AUDIO_PATHS, Multipart


def transforms_of(documents: ProcessDocuments, extensions: Extensions | None = None) -> Transforms:
    """All that the documents name.

    Raises:
        ConfigurationError: with all that is wrong with them.
    """
    problems: list[str] = []
    others = extensions or Extensions()
    made = Transforms(
        requests={config.name: _of_requests(config, others, problems) for config in documents.transforms},
        answers={config.name: _of_answers(config, others, problems) for config in documents.answer_transforms},
    )
    if problems:
        raise ConfigurationError(tuple(problems))
    return made


def transform_problems(documents: ProcessDocuments, extensions: Extensions | None = None) -> Sequence[str]:
    """What is wrong with their parameters."""
    try:
        transforms_of(documents, extensions)
    except ConfigurationError as exc:
        return exc.problems
    return ()


def _of_requests(config: TransformConfig, others: Extensions, problems: list[str]) -> BodyTransform:
    given = Parameters(config.parameters, f"{config.where}.parameters", problems)
    made: BodyTransform
    match config.type:
        case "gcs_uri_multipart":
            made = GcsUriMultipart(given.words("providers"))
        case "multipart":
            made = Multipart(
                endpoints=given.words("endpoints", AUDIO_PATHS),
                providers=given.words("providers", ()),
                base64_field=given.text("base64_field", "file_base64"),
                file_field=given.text("file_field", "file"),
                filename=given.text("filename", "audio.wav"),
            )
        case "extension":
            parts = TransformParts(given=given, name=config.name)
            found = others.make("transform", config.extension, parts, f"{config.where}.type")
            made = GuardedBodyTransform(cast(BodyTransform, found))
        case _:
            assert_never(config.type)
    given.finish()
    return made


def _of_answers(config: AnswerTransformConfig, others: Extensions, problems: list[str]) -> AnswerTransform:
    given = Parameters(config.parameters, f"{config.where}.parameters", problems)
    made: AnswerTransform
    match config.type:
        case "model_name":
            made = ModelName(names=given.texts("names"))
        case "extension":
            parts = TransformParts(given=given, name=config.name)
            found = others.make("answer transform", config.extension, parts, f"{config.where}.type")
            made = GuardedAnswerTransform(cast(AnswerTransform, found))
        case _:
            assert_never(config.type)
    given.finish()
    return made
