"""``kvstore export`` and ``kvstore import``: prefixes as one file, for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.errors import AmbiguousError, DamagedError, NotFoundError, SettingsError
from kvstore.identity import salt_digest
from kvstore.listing import NamespaceUse
from kvstore.match import Match, Namespace
from kvstore.sizes import counted, format_size
from kvstore.store import Store
from kvstore.tools import terminal
from kvstore.tools.bundle import PACKED, RAW, Bundle, BundleWriter, Manifest
from kvstore.tools.explain import TextOption, TokenizerOption
from kvstore.tools.names import NamespaceOption, SaltOption
from kvstore.tools.naming import find_tokens, namespaces_for, space_of
from kvstore.tools.prompts import Tokens
from kvstore.tools.standing import ID_DIGITS, find_namespace, standing_store
from kvstore.tools.stored import sequences
from kvstore.tools.transfer import export as write_out
from kvstore.tools.transfer import refuse_other_layout, restore


def export(
    file: Annotated[Path, typer.Argument(help="The file to be made, such as rules.safetensors.")],
    prompt: Annotated[
        str | None, typer.Option(help="Only this prefix: a file, ids (1,2,3), a name, or the beginning of a key.")
    ] = None,
    namespace: NamespaceOption = None,
    salt: SaltOption = None,
    with_salt: Annotated[bool, typer.Option("--with-salt", help="Let the file tell a salt by its digest.")] = False,
    level: Annotated[int, typer.Option(help="Of zstd; 0 stores payloads as they are.", min=0, max=19)] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Write a prefix, a name, or a whole namespace to one safetensors file, for another machine.

    The file is as secret as the text. It tells no key and, unless asked, no salt. Payloads are packed and checksummed.

    Example:

        kvstore export greeting.safetensors --prompt greeting --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    with standing_store(path) as store, terminal.progress() as step:
        step("read the index", 0, None)
        space, matches = _chosen(store, prompt, namespace, salt, tokens, as_text)
        blocks = sum(len(pieces) for match in matches for pieces in match.pieces.values())
        name = prompt if prompt in store.names() else None
        told: dict[str, Any] = {
            "namespace": space.root.hex(),
            "label": space.label,
            "sequences": len(matches),
            "dry_run": dry_run,
        }
        if dry_run:
            size = space.layout.sequence_bytes(sum(match.tokens for match in matches))
            told |= {"file": None, "payload_bytes": size}
        else:
            with BundleWriter(file, blocks, replace=force) as writer:
                moved = write_out(store, matches, writer, level, lambda done, total: step("export", done, total))
                digest = space.record.salt.hex() if with_salt and space.record.salt else None
                codec = PACKED if level else RAW
                label, salted = space.label, bool(space.record.salt)
                layout = space.layout.to_json()
                manifest = Manifest(layout, label, salted, digest, codec, moved.blocks, moved.tokens, name)
                sha = writer.finish(manifest)
            told |= {
                "file": str(file),
                "tokens": moved.tokens,
                "blocks": moved.blocks,
                "payload_bytes": moved.payload_bytes,
                "file_bytes": file.stat().st_size,
                "sha256": sha,
            }
    if as_json:
        terminal.print_json(told)
    elif dry_run:
        terminal.console().print(
            f"Would export {counted(len(matches), 'sequence')}, up to {format_size(int(told['payload_bytes']))}."
        )
    else:
        sizes = f"{format_size(int(told['payload_bytes']))} in {format_size(int(told['file_bytes']))}"
        terminal.console().print(escape(f"Exported {counted(told['tokens'], 'token')}, {sizes}, to {file}."))
        terminal.console().print(f"sha256 {told['sha256']}")


def import_(
    file: Annotated[Path, typer.Argument(help="A file that kvstore export made.")],
    namespace: Annotated[
        str | None, typer.Option(help="Refuse an export of another layout than this namespace's.", show_default=False)
    ] = None,
    salt: Annotated[str | None, typer.Option(help="The salt to import it under.", show_default=False)] = None,
    unsalted: Annotated[bool, typer.Option("--unsalted", help="Let everybody use what had a salt.")] = False,
    label: Annotated[
        str | None, typer.Option(help="How listings name it; else as at home.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Pin the prefix under this name.", show_default=False)] = None,
    sha256: Annotated[str | None, typer.Option(help="What export said; anything else is refused.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only verify.")] = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Verify an export and take its prefixes into the store. May be run again after an interruption.

    Nothing is imported unless every checksum is right and the layout is that of the namespace it goes to. Import only
    what you trust as much as the model: whoever made the file chose the KV.

    Example:

        kvstore import greeting.safetensors --salt first --path ./store
    """
    with Bundle(file) as bundle, standing_store(path) as store, terminal.progress() as step:
        if sha256 is not None and sha256.lower() != bundle.digest:
            raise DamagedError(f"{file} has the digest {bundle.digest}", "it is not the file that export spoke of")
        chosen = _salt_for(bundle, salt, unsalted)
        use = _target(store, bundle, namespace, chosen)
        bundle.verify(lambda done, total: step("verify", done, total))
        told: dict[str, Any] = {
            "file": str(file),
            "sha256": bundle.digest,
            "tokens": bundle.manifest.tokens,
            "dry_run": dry_run,
        }
        if not dry_run:
            kept = label if label is not None else use.record.label if use else bundle.manifest.label
            space = store.namespace(bundle.layout, salt=chosen, label=kept)
            moved = restore(store, bundle, space, lambda done, total: step("import", done, total))
            if name is not None:
                _pin(store, bundle, space, name)
            told |= {"namespace": space.root.hex(), "label": kept, "sequences": moved.sequences}
            told |= {"new_blocks": moved.blocks, "known_blocks": moved.known, "payload_bytes": moved.payload_bytes}
    if as_json:
        terminal.print_json(told)
    elif dry_run:
        terminal.console().print(escape(f"{file} is whole: {counted(bundle.manifest.tokens, 'token')}."))
    else:
        new = counted(moved.blocks, "new block")
        text = f"Imported {counted(bundle.manifest.tokens, 'token')} into {told['label']}: {new}."
        terminal.console().print(escape(text))


def _chosen(
    store: Store, prompt: str | None, namespace: str | None, salt: str | None, tokens: Tokens | None, as_text: bool
) -> tuple[Namespace, list[Match]]:
    """What is to be exported. Raises NotFoundError, AmbiguousError."""
    uses = namespaces_for(store, namespace, salt)
    if prompt is not None:
        space, ids = find_tokens(store, prompt, uses, tokens, as_text, settled=True)
        match = store.match(space, ids)
        if match.tokens < len(ids):
            raise NotFoundError(f"only {match.tokens} of {len(ids)} tokens are stored", "kvstore explain says why")
        return space, [match]
    if len(uses) > 1:
        roots = ", ".join(use.record.label or use.record.root.hex()[:ID_DIGITS] for use in uses)
        raise AmbiguousError(f"the store has {len(uses)} namespaces", f"pass --namespace or --prompt: {roots}")
    space = space_of(uses[0])
    matches = [store.match(space, one.tokens) for one in sequences(store, space.root)]
    matches = [match for match in matches if match.tokens]
    if not matches:
        raise NotFoundError(
            f"nothing is stored in {space.label or space.root.hex()[:ID_DIGITS]}", "kvstore ls shows it"
        )
    return space, matches


def _salt_for(bundle: Bundle, salt: str | None, unsalted: bool) -> str:
    """The salt to import under. Raises SettingsError where it is missing, or is another one than at home."""
    manifest = bundle.manifest
    if salt is not None and unsalted:
        raise SettingsError("--salt and --unsalted exclude each other", "pass one of them")
    if manifest.salted and salt is None and not unsalted:
        raise SettingsError(
            "what was exported had a salt, so that not everybody could use it",
            "pass --salt with the one to import it under, or --unsalted to share it",
        )
    if manifest.salt is not None and salt is not None and salt_digest(salt).hex() != manifest.salt:
        raise SettingsError("--salt is another salt than the one it was exported with", "pass that salt")
    return salt or ""


def _target(store: Store, bundle: Bundle, namespace: str | None, salt: str) -> NamespaceUse | None:
    """The namespace it goes to, where that is there already. Raises LayoutError for one of another layout."""
    if namespace is not None:
        use = find_namespace(store, namespace)
        refuse_other_layout(bundle.layout, use.layout, namespace)
        if use.record.salt != salt_digest(salt):
            raise SettingsError(f"{namespace} has another salt", "pass its salt with --salt")
        return use
    root = bundle.layout.root(salt)
    known = store.namespaces()
    there = next((one for one in known if one.record.root == root), None)
    label = bundle.manifest.label
    alike = [one for one in known if label and one.record.label == label]
    if there is None and alike and all(one.layout != bundle.layout for one in alike):
        refuse_other_layout(bundle.layout, alike[0].layout, f"the store's {label}")
    return there


def _pin(store: Store, bundle: Bundle, space: Namespace, name: str) -> None:
    found = [ids for _, ids in bundle.sequences()]
    if len(found) != 1:
        raise SettingsError(f"the export has {len(found)} sequences", "pin one of them with kvstore pin")
    store.pin(name, space, found[0])
