"""Tokens for the APIs of Google Cloud: of the account that a machine has, or of a file with the key of one.

The file is the one that GOOGLE_APPLICATION_CREDENTIALS names, of a service account. A machine of Google's gives tokens
at an address that only it can reach.

The library google-auth was weighed. It knows more kinds of accounts, and would save some sixty lines. But it blocks and
brings `requests`, and workers on Google's machines need no package as it is.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from orchestrator.workers.executors.asking import Answer
from orchestrator.workers.executors.protocol import Unequipped, Unreachable
from orchestrator.workers.executors.rest import Api

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_EARLY = 120.0
"""Seconds before its end at which a token is replaced."""
_METADATA = "metadata.google.internal"


class GoogleToken:
    """Returns a token that is valid for some minutes; concurrent callers wait for one."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._token = ""
        self._ends = 0.0
        self._turn = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._turn:
            if time.monotonic() >= self._ends - _EARLY:
                file = self._environ.get("GOOGLE_APPLICATION_CREDENTIALS")
                answer = await (self._of_file(Path(file)) if file else self._of_machine())
                data = answer.data
                if answer.status != 200 or not isinstance(data, dict) or "access_token" not in data:
                    raise Unreachable(f"Google gives no token: it answered with status {answer.status}.")
                self._token = str(data["access_token"])
                self._ends = time.monotonic() + float(data.get("expires_in", 0))
        return self._token

    def forget(self, refused: str) -> bool:
        """Get another one next time: Google refuses this one, which was revoked, or whose account has other keys now.

        Of concurrent callers that were refused, the first has done that.
        """
        if refused == self._token:
            self._ends = 0.0
        return True

    async def _of_machine(self) -> Answer:
        host = self._environ.get("GCE_METADATA_HOST", _METADATA)
        api = Api(url=f"http://{host}", headers={"Metadata-Flavor": "Google"}, timeout=5.0)
        try:
            return await api.ask("GET", "/computeMetadata/v1/instance/service-accounts/default/token")
        except Unreachable as error:
            raise Unreachable(
                f"This worker has no account of Google Cloud: it runs on no machine of theirs ({error}), and "
                f"GOOGLE_APPLICATION_CREDENTIALS names no file."
            ) from error

    async def _of_file(self, path: Path) -> Answer:
        try:
            key = json.loads(path.read_text(encoding="utf-8"))
            uri, assertion = str(key["token_uri"]), _signed(key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unequipped(
                f"The file {path} that GOOGLE_APPLICATION_CREDENTIALS names is no key of a service account: {error!r}."
            ) from None
        form = urlencode({"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion})
        parts = urlsplit(uri)
        api = Api(url=f"{parts.scheme}://{parts.netloc}")
        return await api.ask("POST", parts.path, body=form.encode(), content_type="application/x-www-form-urlencoded")


def _signed(key: Mapping[str, Any]) -> str:
    """Return the claim of a service account, signed with its key."""
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
    except ModuleNotFoundError:
        raise Unequipped("The key of a service account needs: pip install 'durable-orchestrator[cloud_run]'.") from None
    now = int(time.time())
    claim = {"iss": key["client_email"], "scope": _SCOPE, "aud": key["token_uri"], "iat": now, "exp": now + 3_600}
    head = {"alg": "RS256", "typ": "JWT", "kid": key.get("private_key_id", "")}
    text = f"{_part(head)}.{_part(claim)}"
    private = serialization.load_pem_private_key(str(key["private_key"]).encode(), password=None)
    if not isinstance(private, rsa.RSAPrivateKey):
        raise ValueError("its key is no RSA key")
    return f"{text}.{_base64(private.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _part(value: Mapping[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
