//! Tokens of clients. Only their digests are kept.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::AUTHORIZATION;

use super::files::{Contents, FileError, SettingFile};
use crate::config::AuthConfig;

/// Bytes of a token. A short one could be guessed.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// Most tokens of all files. Every call is compared with each of them.
const TOKENS: usize = 256;

/// What a client may do. A token has the roles of all files that contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Predict,
    Admin,
    Metrics,
}

impl Role {
    const ALL: [Self; 3] = [Self::Predict, Self::Admin, Self::Metrics];

    fn bit(self) -> u8 {
        1 << self as u8
    }

    /// The setting that names its file.
    pub(crate) fn setting(self) -> &'static str {
        match self {
            Self::Predict => "auth.predict",
            Self::Admin => "auth.admin",
            Self::Metrics => "auth.metrics",
        }
    }
}

/// Why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("authorization: expected Bearer and a token of {}, got none", .0.setting())]
    Missing(Role),
    #[error("authorization: expected Bearer and a token of {}, got an unknown one", .0.setting())]
    Unknown(Role),
    #[error("authorization: expected a token of {}, got one of another role", .0.setting())]
    OtherRole(Role),
}

/// A SHA-256 digest. Words are compared in constant time much faster than bytes.
type Words = [u64; 4];

struct Token {
    digest: Words,
    roles: u8,
}

/// The tokens of all files.
pub(crate) struct Tokens {
    tokens: Vec<Token>,
    /// The roles that have a file.
    guarded: u8,
}

/// The files of [`read`].
pub(crate) fn files(config: &AuthConfig) -> Vec<SettingFile> {
    let paths = [&config.predict, &config.admin, &config.metrics];
    let files = Role::ALL.into_iter().zip(paths);
    files
        .filter_map(|(role, path)| Some(SettingFile { setting: role.setting(), path: path.clone()? }))
        .collect()
}

/// # Errors
/// When a file has no tokens, too many, or a line that is no token.
pub(crate) fn read(files: &[Contents]) -> Result<Tokens, FileError> {
    let mut all = Tokens { tokens: Vec::new(), guarded: 0 };
    for role in Role::ALL {
        let Some(file) = files.iter().find(|file| file.setting == role.setting()) else { continue };
        all.guarded |= role.bit();
        let tokens = lines(&file.bytes).map_err(|wrong| file.wrong(wrong))?;
        tokens.for_each(|token| all.add(token, role));
        if all.tokens.len() > TOKENS {
            return Err(file.wrong(format!("limit {TOKENS} tokens in all files, got more")));
        }
    }
    Ok(all)
}

/// The tokens of a file: one on each line. Empty lines and those that begin with # do not count.
///
/// # Errors
/// What is wrong, without any part of the file.
pub(crate) fn lines(file: &[u8]) -> Result<impl Iterator<Item = &[u8]>, String> {
    let lines = file.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).enumerate();
    let tokens = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(b"#"));
    for (at, token) in tokens.clone() {
        let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            let (line, got) = (at + 1, token.len());
            return Err(format!(
                "line {line}: expected {least} to {most} visible characters, got {got} bytes"
            ));
        }
    }
    if tokens.clone().next().is_none() {
        return Err("expected a token on each line, got none".to_owned());
    }
    Ok(tokens.map(|(_, token)| token))
}

impl Tokens {
    fn add(&mut self, token: &[u8], role: Role) {
        let digest = sha256(token);
        match self.tokens.iter_mut().find(|known| known.digest == digest) {
            Some(known) => known.roles |= role.bit(),
            None => self.tokens.push(Token { digest, roles: role.bit() }),
        }
    }

    /// # Errors
    /// When the role needs a token, and the headers do not have one of it.
    pub(crate) fn allow(&self, role: Role, headers: &HeaderMap) -> Result<(), Refusal> {
        if self.guarded & role.bit() == 0 {
            return Ok(());
        }
        let value = headers.get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
        let password = (role == Role::Metrics).then(|| password(value)).flatten();
        let token = password.as_deref().or_else(|| bearer(value));
        let roles = self.roles(token.ok_or(Refusal::Missing(role))?);
        match (roles, roles & role.bit()) {
            (0, _) => Err(Refusal::Unknown(role)),
            (_, 0) => Err(Refusal::OtherRole(role)),
            _ => Ok(()),
        }
    }

    /// The roles of a token. The time depends on its length and the number of known tokens only.
    fn roles(&self, token: &[u8]) -> u8 {
        let digest = sha256(token);
        self.tokens.iter().fold(0, |roles, known| {
            let words = known.digest.iter().zip(&digest);
            let equal = words.fold(Choice::from(1), |equal, (own, other)| equal & own.ct_eq(other));
            roles | u8::conditional_select(&0, &known.roles, equal)
        })
    }
}

/// The token of a header's value: `Bearer`, in any case, and the token.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// The password of a header's value: `Basic`, in any case, and a name and a password in Base64. Browsers send
/// pages' requests with it, and cannot send `Bearer`.
fn password(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, encoded) = value.split_at_checked(6)?;
    let decoded =
        STANDARD.decode(encoded.trim_ascii()).ok().filter(|_| scheme.eq_ignore_ascii_case(b"basic "))?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    Some(decoded[colon + 1..].to_vec())
}

fn sha256(token: &[u8]) -> Words {
    let digest = digest(&SHA256, token);
    let words = digest.as_ref().as_chunks().0;
    std::array::from_fn(|at| u64::from_le_bytes(words[at]))
}

#[cfg(test)]
mod tests;
