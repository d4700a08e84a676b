//! The client of the native gRPC interface, for `score` and `load`, and the connection of `label` and
//! `models`.
//!
//! A [`Client`] gets a model's schema from the server, and reads from a data file the columns that the schema
//! names. Values are sent as they are in the file, because the server hashes and transforms them
//! ([`request`]). Messages are encoded before they are sent, so that repeating a request copies nothing.
//! `connect` has the flags of the connection, and `failure` the words for one that failed.

mod connect;
mod failure;

use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::cli::InputError;
use crate::cli::flags::whole as whole_number;
use crate::cli::format_flags::{FormatFlags, MalformedFlag};
use crate::dataset::{self, Labels, ReadOptions, Reader};
use crate::metrics::code_name;
use crate::schema::Schema;
use crate::server::proto::ctr_client::CtrClient;
use crate::server::proto::{
    FeatureColumn, GetModelRequest, GetModelResponse, PredictRequest, PredictResponse,
};
use crate::types::{RawBatch, RawFeature, RawValues};
pub(crate) use connect::{CHANGE_TIMEOUT, Connect, Token, call};
use failure::{explained, is_late};

/// Flags that name a served model, and the form of the data for it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Target {
    #[command(flatten)]
    server: Connect,
    /// Name of the model
    #[arg(long, value_name = "NAME")]
    pub model: String,
    /// The version that computes the scores, one of those that are loaded [default: the server decides]
    #[arg(long, value_name = "N", conflicts_with = "model_label")]
    #[arg(value_parser = whole_number::<u64>(1, u64::MAX))]
    model_version: Option<u64>,
    /// The label whose version computes the scores, such as canary [default: the server decides]
    #[arg(long, value_name = "NAME")]
    model_label: Option<String>,
    #[command(flatten)]
    format: FormatFlags,
    /// The file has no label column: a line of criteo-tsv has 39 fields, and a line of --columns no label
    #[arg(long)]
    unlabelled: bool,
    #[command(flatten)]
    malformed: MalformedFlag,
}

impl Target {
    /// The server.
    pub(crate) fn addr(&self) -> &str {
        &self.server.addr
    }

    /// Checks that the version or the label of the flags can score.
    fn check_loaded(&self, served: &GetModelResponse) -> Result<(), InputError> {
        if let Some(version) = self.model_version.filter(|version| !served.versions.contains(version)) {
            let loaded = Vec::from_iter(served.versions.iter().map(u64::to_string)).join(", ");
            return Err(InputError(anyhow!("--model-version: {version} is not loaded, only {loaded}")));
        }
        let Some(name) = &self.model_label else { return Ok(()) };
        match served.labels.iter().find(|label| label.label == *name) {
            Some(label) if label.version > 0 => Ok(()),
            Some(_) => Err(InputError(anyhow!("--model-label: the version of {name:?} is not loaded"))),
            None => Err(InputError(anyhow!("--model-label: the model has no label {name:?}"))),
        }
    }
}

/// A connection to a server, and the server's description of a model.
#[derive(Clone)]
pub(crate) struct Client {
    channel: Channel,
    token: Option<Token>,
    model: String,
    /// What must compute the scores: a version, or a label; 0 and no name if the server decides.
    version: u64,
    label: String,
    schema: Schema,
    /// Most samples of a request.
    max_samples: usize,
    /// Most bytes of a request.
    max_bytes: usize,
}

/// How long the description of a model may take.
pub(crate) const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the rest of an answer may take after the timeout of a call, which tonic applies to the headers of
/// the answer only.
const REST: Duration = Duration::from_secs(1);

/// Most bytes of an answer. A score takes 4 bytes, and the size of a schema is limited.
pub(crate) const ANSWER_BYTES: usize = 64 << 20;

/// A call with a time limit from its beginning to the end of its answer.
///
/// # Errors
/// The status of the call, or [`Code::DeadlineExceeded`].
pub(crate) async fn whole<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let seconds = timeout.as_secs_f64();
    let late = |what| Err(Status::deadline_exceeded(format!("{what} {seconds} s")));
    match tokio::time::timeout(timeout + REST, call).await {
        // tonic would call it cancelled.
        Ok(Err(status)) if is_late(&status) => late("no answer within"),
        Ok(ended) => ended,
        Err(_) => late("the answer is not complete after"),
    }
}

impl Client {
    /// Connects to a server and gets the description of a model.
    ///
    /// # Errors
    /// When the address is wrong, the server cannot be reached, or it does not serve the model.
    pub(crate) async fn connect(target: &Target) -> anyhow::Result<Self> {
        let token = target.server.token()?;
        let channel = target.server.channel().await?;
        let addr = &target.server.addr;
        let mut ctr = CtrClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES);
        let message = GetModelRequest { model: target.model.clone() };
        let request = call(message, DESCRIBE_TIMEOUT, token.as_ref());
        let answer = whole(DESCRIBE_TIMEOUT, ctr.get_model(request)).await;
        let answer = answer.map_err(|status| match status.code() {
            Code::NotFound => InputError(anyhow!("{}", status.message()).context("--model")).into(),
            _ => anyhow!("{addr}: {}", status_text(&target.server.first_failed(status))),
        })?;
        let answer = answer.into_inner();
        target.check_loaded(&answer)?;
        let schema = Schema::parse(&answer.model_toml)
            .map_err(|error| anyhow!("{addr}: the server's schema: {error}"))?;
        let limits = answer.limits.unwrap_or_default();
        Ok(Self {
            channel,
            token,
            model: target.model.clone(),
            version: target.model_version.unwrap_or_default(),
            label: target.model_label.clone().unwrap_or_default(),
            schema,
            max_samples: limits.max_samples as usize,
            max_bytes: usize::try_from(limits.max_bytes).unwrap_or(usize::MAX),
        })
    }

    /// The same model over another connection.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub(crate) async fn connect_again(&self, target: &Target) -> anyhow::Result<Self> {
        Ok(Self { channel: target.server.channel().await?, ..self.clone() })
    }

    /// Scores one encoded request. The request carries the timeout, and the server computes no answer after
    /// it.
    ///
    /// # Errors
    /// The status of the server or of the connection.
    pub(crate) async fn predict(&self, request: Bytes, timeout: Duration) -> Result<PredictResponse, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_BYTES);
        let mut request = Request::new(request);
        request.set_timeout(timeout);
        self.token.iter().for_each(|token| token.add_to(&mut request));
        let path = PathAndQuery::from_static("/flechette.v1.Ctr/Predict");
        let answer = async {
            grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
            grpc.unary(request, path, EncodedCodec).await
        };
        let answer = whole(timeout, answer).await.map_err(|status| explained(status, None))?;
        Ok(answer.into_inner())
    }

    /// Opens a data file to read the model's columns.
    ///
    /// # Errors
    /// When the file cannot be opened, or lacks a column of the schema.
    pub(crate) fn open(&self, target: &Target, file: &Path) -> anyhow::Result<Box<dyn Reader + Send>> {
        target.format.warn_of_lists(&self.schema);
        let (labels, fields) = (Labels::unless(target.unlabelled), target.format.fields());
        let malformed_lines = target.malformed.max_malformed;
        let options = ReadOptions { malformed_lines, labels, fields, ..ReadOptions::default() };
        Ok(dataset::open(target.format.format()?, &[file.to_owned()], &self.schema, options)?)
    }

    /// Samples of a request: `given`, or `default` within the server's limit.
    ///
    /// # Errors
    /// When `given` is more than the server accepts.
    pub(crate) fn batch(&self, given: Option<u32>, default: usize) -> Result<usize, InputError> {
        let limit = self.max_samples;
        match given.map(|samples| samples as usize) {
            Some(got) if got > limit => {
                Err(InputError(anyhow!("--batch: the server accepts at most {limit} samples, got {got}")))
            }
            Some(samples) => Ok(samples),
            None => Ok(default.min(limit)),
        }
    }

    /// Encodes samples as a request for scores, and for logits if they are wanted.
    ///
    /// # Errors
    /// When the message is larger than the server accepts.
    pub(crate) fn encode(&self, raw: &RawBatch, logits: bool) -> Result<Bytes, InputError> {
        let (version, label) = (self.version, self.label.clone());
        let columns = request(&self.model, &self.schema, raw);
        let dense_order = self.schema.dense_order();
        let message = PredictRequest { logits, version, label, dense_order, ..columns }.encode_to_vec();
        if message.len() > self.max_bytes {
            let (samples, got, limit) = (raw.samples, message.len(), self.max_bytes);
            return Err(InputError(anyhow!(
                "--batch: {samples} samples are {got} bytes, the server accepts at most {limit}"
            )));
        }
        Ok(message.into())
    }
}

/// The request message for raw samples. The server hashes their strings and transforms their dense values.
#[must_use]
pub fn request(model: &str, schema: &Schema, raw: &RawBatch) -> PredictRequest {
    let named = schema.features.iter().zip(&raw.features);
    PredictRequest {
        model: model.to_owned(),
        samples: raw.samples as u32,
        dense: raw.dense.clone(),
        features: named.map(|(feature, column)| feature_column(&feature.name, column)).collect(),
        ..PredictRequest::default()
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

/// The code and the message of a status.
#[must_use]
pub(crate) fn status_text(status: &Status) -> String {
    format!("{}: {}", code_name(status.code() as i32), status.message())
}

/// Sends requests that are already encoded, and decodes answers.
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
        message.map(Some).map_err(|error| Status::internal(format!("answer: {error}")))
    }
}

#[cfg(test)]
mod tests;
