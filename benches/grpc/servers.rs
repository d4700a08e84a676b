//! The servers of the comparison, each on core 0.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use flechette::cli::serve::Serving as Loaded;
use flechette::config::{Config, Flags};
use flechette::predict::Predict;
use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::inference::{ModelInferRequest, ModelStatisticsRequest};
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{PredictRequest, PredictResponse};
use tokio::runtime::Runtime;

use super::bare::Bare;
use super::client::{Load, Window};
use super::harness::Options;
use super::harness::program::{Running, Serving, on_core, program};
use super::messages::{self, Messages, framed};

const NATIVE: &str = "flechette.v1.Ctr/Predict";
const KSERVE: &str = "inference.GRPCInferenceService/ModelInfer";

/// Servers that all have the same models, except the echo, which has none.
pub struct Servers {
    ours: Peer,
    echo: Peer,
    triton: Option<Peer>,
    models: String,
    window: Duration,
    runtime: Runtime,
}

/// A child process. Those that print their address also end with their standard input.
struct Peer {
    _process: Running,
    address: SocketAddr,
}

/// This program as a child.
fn this(kind: &str, flags: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--serve", kind]).args(flags);
    Ok(on_core(0, &command))
}

impl Peer {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = Running(child.with_context(|| format!("{command:?}"))?);
        let mut lines = BufReader::new(process.0.stdout.take().context("stdout")?).lines();
        loop {
            let line = lines.next().with_context(|| format!("{command:?} has ended"))??;
            if let Some(address) = line.strip_prefix("grpc=") {
                let address = address.parse()?;
                std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
                return Ok(Self { _process: process, address });
            }
        }
    }
}

impl Servers {
    pub fn start(dir: &Path, options: &Options) -> anyhow::Result<Self> {
        let models = dir.join("models").display().to_string();
        let serve = format!("serve --models {models} --grpc 127.0.0.1:0 --http 127.0.0.1:0 --cache-mode off");
        let Serving { process, grpc, log, .. } = Serving::start(on_core(0, &program(&serve)))?;
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        let triton = options.value("--triton").map(|python| {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/grpc/triton_server.py");
            let mut command = Command::new(python);
            command.args([script, "--models", &models]);
            Peer::start(on_core(0, &command))
        });
        Ok(Self {
            ours: Peer { _process: process, address: grpc },
            echo: Peer::start(this("echo", &[])?)?,
            triton: triton.transpose()?,
            models,
            window: Duration::from_secs(options.number("--seconds", 3) as u64),
            runtime: Runtime::new()?,
        })
    }

    /// Checks that the scores of both protocols are equal, and that Triton gives as many.
    pub fn check(&self, messages: &Messages) -> anyhow::Result<()> {
        let infer = |address: SocketAddr, message: &ModelInferRequest| {
            self.runtime.block_on(async {
                let mut client = GrpcInferenceServiceClient::connect(format!("http://{address}")).await?;
                let response = client.model_infer(message.clone()).await?.into_inner();
                anyhow::Ok(messages::scores(&response))
            })
        };
        let native = messages.native.clone();
        let count = native.samples as usize;
        let ours = self.runtime.block_on(async {
            let mut client = CtrClient::connect(format!("http://{}", self.ours.address)).await?;
            anyhow::Ok(client.predict(native).await?.into_inner().scores)
        })?;
        anyhow::ensure!(ours.len() == count, "{} native scores of {count} samples", ours.len());
        let kserve = infer(self.ours.address, &messages.kserve)?;
        anyhow::ensure!(kserve == ours, "KServe's scores differ from the native ones");
        if let Some(triton) = &self.triton {
            let scores = infer(triton.address, &messages.triton).context("Triton")?;
            anyhow::ensure!(scores.len() == count, "{} scores of Triton of {count} samples", scores.len());
        }
        Ok(())
    }

    /// The window of a side; `None` if it is left out.
    pub fn window(&self, side: &str, messages: &Messages, load: &Load<'_>) -> anyhow::Result<Option<Window>> {
        let (native, kserve) = (framed(&messages.native), framed(&messages.kserve));
        let model = &messages.native.model;
        match side {
            "native" => {
                self.counted(self.ours.address, model, || load.run(self.ours.address, NATIVE, &native))
            }
            "kserve" => {
                self.counted(self.ours.address, model, || load.run(self.ours.address, KSERVE, &kserve))
            }
            "echo" => load.run(self.echo.address, NATIVE, &native),
            "triton" => {
                let Some(Peer { address, .. }) = self.triton else { return Ok(None) };
                // It shows no statistics to clients, so its answers are only checked before each window.
                self.check(messages)?;
                load.run(address, KSERVE, &framed(&messages.triton))
            }
            _ => self.forward(model, messages.native.samples as usize),
        }
        .map(Some)
    }

    /// Checks that the server has counted a success for each answer, because a failed call also has the HTTP
    /// status 200.
    fn counted(
        &self,
        address: SocketAddr,
        model: &str,
        run: impl FnOnce() -> anyhow::Result<Window>,
    ) -> anyhow::Result<Window> {
        let successes = || {
            let name = model.to_owned();
            self.runtime.block_on(async move {
                let mut client = GrpcInferenceServiceClient::connect(format!("http://{address}")).await?;
                let request = ModelStatisticsRequest { name, ..ModelStatisticsRequest::default() };
                let answer = client.model_statistics(request).await?.into_inner();
                let counts = answer.model_stats.first().and_then(|model| model.inference_stats.as_ref());
                anyhow::Ok(counts.and_then(|counts| counts.success).map_or(0, |success| success.count))
            })
        };
        let before = successes()?;
        let window = run()?;
        let counted = successes()? - before;
        anyhow::ensure!(counted >= window.answers, "{} answers, but {counted} successes", window.answers);
        Ok(window)
    }

    fn forward(&self, model: &str, count: usize) -> anyhow::Result<Window> {
        let (millis, count) = (self.window.as_millis().to_string(), count.to_string());
        let flags = ["--models", &self.models, "--model", model, "--samples", &count, "--window-ms", &millis];
        let output = this("forward", &flags)?.output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let rate: f64 = text.trim().parse().with_context(|| format!("forward: {output:?}"))?;
        Ok(Window { rate, answers: 0, micros: [1e6 / rate; 3] })
    }
}

/// In a child process: prints how many batches of a model are computed per second.
pub fn forward(options: &Options) -> anyhow::Result<()> {
    let flags = Flags { cache_mode: Some("off".into()), ..Flags::default() };
    let (models, name) = (options.value("--models"), options.value("--model"));
    let serving = Loaded::load(&Config::resolve(&flags, [], None)?, Path::new(&models.context("--models")?))?;
    let engines = serving.engines();
    let engine = engines.iter().find(|engine| Some(engine.describe().model) == name).context("--model")?;
    let batch = messages::batch(&engine.describe().schema, options.number("--samples", 1));
    println!("{}", options.rate(|| engine.predict(&batch).map_or(0, |_| 1)));
    Ok(())
}

/// In a child process: answers every Predict call with as many scores as its message has samples, until
/// standard input ends.
pub fn echo() -> anyhow::Result<()> {
    let predict = |request: PredictRequest| {
        let scores = request.dense.iter().copied().cycle().take(request.samples as usize).collect();
        Ok(PredictResponse { scores, version: 1, ..PredictResponse::default() })
    };
    Bare { predict, described: None }.serve()
}
