//! The client side of the native gRPC interface, shared by the commands that talk to a server.
//!
//! A [`Client`] learns a model's schema from the server, so that a data file is read by the columns
//! that the server expects. Samples are sent as they stand in the file, because hashing and
//! transforms are the server's ([`request`]). Messages are encoded before they are sent and travel as
//! bytes: a retry, and a load that repeats its requests, copy nothing.

use std::error::Error;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::cli::InputError;
use crate::dataset::{self, Format, Labels, ReadOptions, Reader};
use crate::schema::Schema;
use crate::server::proto::ctr_client::CtrClient;
use crate::server::proto::{FeatureColumn, GetModelRequest, PredictRequest, PredictResponse};
use crate::types::{RawBatch, RawFeature, RawValues};

/// Where a model is served: flags of every command that talks to a server.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Target {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8001")]
    pub addr: String,
    /// Name of the model
    #[arg(long, value_name = "NAME")]
    pub model: String,
}

/// A connection to a server, and what it said of a model.
#[derive(Clone)]
pub(crate) struct Client {
    channel: Channel,
    /// The model's name.
    pub model: String,
    /// Its schema, as the server has it.
    pub schema: Schema,
    /// The version that served when this was asked.
    pub version: u64,
    /// Most samples that the server takes in one request.
    pub max_samples: usize,
    /// Most bytes that the server takes in one request.
    pub max_bytes: usize,
}

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the server may take to describe a model.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest answer that is taken. Scores are 4 bytes a sample, and a schema has limits.
const ANSWER_BYTES: usize = 64 << 20;

impl Client {
    /// Connects and asks for the model.
    ///
    /// # Errors
    /// An address that is none, a server that is not reached, a model that it does not serve.
    pub(crate) async fn connect(target: &Target) -> anyhow::Result<Self> {
        let channel = connect(&target.addr).await?;
        let mut ctr = CtrClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES);
        let mut question = Request::new(GetModelRequest { model: target.model.clone() });
        question.set_timeout(DESCRIBE_TIMEOUT);
        let answer = ctr.get_model(question).await.map_err(|status| match status.code() {
            Code::NotFound => InputError(anyhow!("--model: {}", status.message())).into(),
            _ => anyhow!("{}: {}", target.addr, told(&status)),
        })?;
        let answer = answer.into_inner();
        let schema = Schema::parse(&answer.model_toml)
            .map_err(|error| anyhow!("{}: the server's schema: {error}", target.addr))?;
        let limits = answer.limits.unwrap_or_default();
        Ok(Self {
            channel,
            model: target.model.clone(),
            schema,
            version: answer.version,
            max_samples: limits.max_samples as usize,
            max_bytes: usize::try_from(limits.max_bytes).unwrap_or(usize::MAX),
        })
    }

    /// The same model over a connection of its own.
    ///
    /// # Errors
    /// A server that is not reached.
    pub(crate) async fn beside(&self, target: &Target) -> anyhow::Result<Self> {
        Ok(Self { channel: connect(&target.addr).await?, ..self.clone() })
    }

    /// Scores one encoded request. `timeout` is sent along, so the server drops what nobody awaits.
    ///
    /// # Errors
    /// The server's status, or that of the connection.
    pub(crate) async fn predict(&self, request: Bytes, timeout: Duration) -> Result<PredictResponse, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_BYTES);
        let unready = |error: tonic::transport::Error| Status::unavailable(chain(&error));
        grpc.ready().await.map_err(unready)?;
        let mut request = Request::new(request);
        request.set_timeout(timeout);
        let path = PathAndQuery::from_static("/flechette.v1.Ctr/Predict");
        Ok(grpc.unary(request, path, EncodedCodec).await?.into_inner())
    }

    /// A reader of the model's columns in a data file.
    ///
    /// # Errors
    /// A file that cannot be opened, or that lacks a column of the schema.
    pub(crate) fn open(
        &self,
        format: Format,
        file: &Path,
        labels: Labels,
    ) -> anyhow::Result<Box<dyn Reader + Send>> {
        let options = ReadOptions { labels, ..ReadOptions::default() };
        Ok(dataset::open(format, &[file.to_owned()], &self.schema, options)?)
    }

    /// How many samples a request may have: what the user asked for, or `default`, within the
    /// server's limit.
    ///
    /// # Errors
    /// More than the server takes.
    pub(crate) fn batch(&self, asked: Option<u32>, default: usize) -> Result<usize, InputError> {
        let limit = self.max_samples;
        match asked.map(|samples| samples as usize) {
            Some(got) if got > limit => {
                Err(InputError(anyhow!("--batch: the server takes at most {limit} samples, got {got}")))
            }
            Some(samples) => Ok(samples),
            None => Ok(default.min(limit)),
        }
    }

    /// The samples as an encoded request to this model.
    ///
    /// # Errors
    /// A message that is larger than the server takes.
    pub(crate) fn encode(&self, raw: &RawBatch) -> Result<Bytes, InputError> {
        let message = request(&self.model, &self.schema, raw).encode_to_vec();
        if message.len() > self.max_bytes {
            let (samples, got, limit) = (raw.samples, message.len(), self.max_bytes);
            return Err(InputError(anyhow!(
                "--batch: {samples} samples are {got} bytes, the server takes at most {limit}"
            )));
        }
        Ok(message.into())
    }
}

/// The samples as a request, untouched: strings as strings, ids as ids, dense values raw.
#[must_use]
pub fn request(model: &str, schema: &Schema, raw: &RawBatch) -> PredictRequest {
    let named = schema.features.iter().zip(&raw.features);
    PredictRequest {
        model: model.to_owned(),
        version: 0,
        samples: raw.samples as u32,
        dense: raw.dense.clone(),
        features: named.map(|(feature, column)| feature_column(&feature.name, column)).collect(),
    }
}

fn feature_column(name: &str, column: &RawFeature) -> FeatureColumn {
    let mut message = FeatureColumn { name: name.to_owned(), ..FeatureColumn::default() };
    let lengths = column.offsets.windows(2).map(|pair| pair[1] - pair[0]);
    if lengths.clone().any(|length| length != 1) {
        message.lengths = lengths.collect();
    }
    match &column.values {
        RawValues::Ids(ids) => message.ids.clone_from(ids),
        RawValues::Text { bytes, ends } => {
            let bytes = Bytes::copy_from_slice(bytes);
            let mut begin = 0;
            message.strings.extend(ends.iter().map(|&end| {
                let string = bytes.slice(begin..end as usize);
                begin = end as usize;
                string
            }));
        }
    }
    message
}

async fn connect(addr: &str) -> anyhow::Result<Channel> {
    let wrong = || InputError(anyhow!("--addr: expected http://HOST:PORT, got {addr:?}"));
    let uri: Uri = addr.parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) {
        return Err(wrong().into());
    }
    let endpoint = Endpoint::from(uri).connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
    endpoint.connect().await.map_err(|error| anyhow!("{addr}: cannot connect: {}", chain(&error)))
}

/// A status as a line: its code's name and the server's words.
#[must_use]
pub(crate) fn told(status: &Status) -> String {
    format!("{}: {}", code_name(status.code()), status.message())
}

/// A code as the protocol spells it.
#[must_use]
pub(crate) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// An error and its causes on one line. The transport's own text says only that it failed.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

/// Requests that are encoded already; answers as messages.
struct EncodedCodec;

impl Codec for EncodedCodec {
    type Encode = Bytes;
    type Decode = PredictResponse;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for EncodedCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for EncodedCodec {
    type Item = PredictResponse;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<PredictResponse>, Status> {
        let message = PredictResponse::decode(from.copy_to_bytes(from.remaining()));
        message.map(Some).map_err(|error| Status::internal(format!("the answer: {error}")))
    }
}

#[cfg(test)]
mod tests;
