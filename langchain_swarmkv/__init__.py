"""Many LangGraph agents on one long document, from a single prefill.

    from langchain_swarmkv import AnalystNode, ChatSwarmKV, DocumentNode, SwarmStateGraph

`ChatSwarmKV` is a LangChain chat model on llama.cpp: whatever calls share a prefix, from whatever
threads or event loops, compute it once and decode together. `DocumentNode` and `AnalystNode` put
that into a LangGraph graph, and `SwarmStateGraph.compile` checks that it will fit the context.
"""

from __future__ import annotations

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.config import (
    EngineConfig,
    FlashAttention,
    KVType,
    LoraAdapter,
    SamplingParams,
    SnapshotPolicy,
)
from langchain_swarmkv.documents.reader import DocumentWarning, read_document
from langchain_swarmkv.engine.contract import (
    Batch,
    Engine,
    EngineLimits,
    ModelFacts,
    Sampler,
    SpecialToken,
    Tokenizer,
)
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import (
    AnswerError,
    ChatTemplateError,
    ConfigurationError,
    ContextBudgetError,
    DecodeAbortedError,
    DecodeError,
    DecodeFatalError,
    DeviceLockError,
    DeviceLockNotHeldError,
    DeviceLockTimeoutError,
    DocumentError,
    DocumentMissingError,
    EngineClosedError,
    EngineError,
    ForkedProcessError,
    GrammarError,
    GraphError,
    InvalidBatchError,
    InvalidRequestError,
    MissingReducerError,
    ModelError,
    ModelFormatError,
    ModelLoadError,
    ModelNotFoundError,
    NoRoomError,
    PromptError,
    RequestCancelledError,
    RequestError,
    RequestTimeoutError,
    SequenceError,
    SnapshotError,
    SnapshotFormatError,
    SnapshotKeyError,
    SnapshotMismatchError,
    SnapshotStorageError,
    SwarmKVError,
    TruncatedAnswerError,
    UnboundedCycleError,
    UnreachableAnalystError,
    UnsupportedContentError,
    UnsupportedModelError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.graph.budget_report import (
    AnalystBudget,
    BudgetReport,
    BudgetWarning,
    GraphWarning,
    PoolBudget,
    Verdict,
)
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.graph.state import SwarmState, merge_findings
from langchain_swarmkv.graph.state_graph import CompiledSwarmGraph, SwarmStateGraph
from langchain_swarmkv.prompts.document import DEFAULT_INSTRUCTIONS, DocumentRef, document_message
from langchain_swarmkv.scheduling.device_locks import DeviceLease, DeviceLockManager
from langchain_swarmkv.scheduling.request import (
    PrefillProgress,
    RequestHandle,
    RequestResult,
    TokenChunk,
    TokenLogprob,
)
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.snapshots.disk_store import DiskSnapshotStore, StoredFile
from langchain_swarmkv.snapshots.memory_store import MemorySnapshotStore
from langchain_swarmkv.snapshots.snapshot import KVSnapshot
from langchain_swarmkv.snapshots.store import FoundPrefix, SnapshotStore, StoredPrefix
from langchain_swarmkv.statistics import (
    DeviceStatistics,
    EngineStatistics,
    LockStatistics,
    OwnerLockStatistics,
    PercentileSeconds,
    PrefixSource,
    RequestStatistics,
)

__all__ = [
    "DEFAULT_INSTRUCTIONS",
    "AnalystBudget",
    "AnalystNode",
    "AnswerError",
    "Batch",
    "BudgetReport",
    "BudgetWarning",
    "ChatSwarmKV",
    "ChatTemplateError",
    "CompiledSwarmGraph",
    "ConfigurationError",
    "ContextBudgetError",
    "DecodeAbortedError",
    "DecodeError",
    "DecodeFatalError",
    "DeviceLease",
    "DeviceLockError",
    "DeviceLockManager",
    "DeviceLockNotHeldError",
    "DeviceLockTimeoutError",
    "DeviceStatistics",
    "DiskSnapshotStore",
    "DocumentError",
    "DocumentMissingError",
    "DocumentNode",
    "DocumentRef",
    "DocumentWarning",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineLimits",
    "EngineStatistics",
    "FakeEngine",
    "FlashAttention",
    "ForkedProcessError",
    "FoundPrefix",
    "GrammarError",
    "GraphError",
    "GraphWarning",
    "InvalidBatchError",
    "InvalidRequestError",
    "KVSnapshot",
    "KVType",
    "LockStatistics",
    "LoraAdapter",
    "MemorySnapshotStore",
    "MissingReducerError",
    "ModelError",
    "ModelFacts",
    "ModelFormatError",
    "ModelIdentity",
    "ModelLoadError",
    "ModelNotFoundError",
    "NoRoomError",
    "OwnerLockStatistics",
    "PercentileSeconds",
    "PoolBudget",
    "PrefillProgress",
    "PrefixSource",
    "PromptError",
    "RequestCancelledError",
    "RequestError",
    "RequestHandle",
    "RequestResult",
    "RequestStatistics",
    "RequestTimeoutError",
    "Sampler",
    "SamplingParams",
    "SequenceError",
    "SnapshotError",
    "SnapshotFormatError",
    "SnapshotKeyError",
    "SnapshotMismatchError",
    "SnapshotPolicy",
    "SnapshotStorageError",
    "SnapshotStore",
    "SpecialToken",
    "StoredFile",
    "StoredPrefix",
    "SwarmEngine",
    "SwarmKVError",
    "SwarmState",
    "SwarmStateGraph",
    "TokenChunk",
    "TokenLogprob",
    "Tokenizer",
    "TruncatedAnswerError",
    "UnboundedCycleError",
    "UnreachableAnalystError",
    "UnsupportedContentError",
    "UnsupportedModelError",
    "Verdict",
    "check_budget",
    "document_message",
    "merge_findings",
    "read_document",
]
