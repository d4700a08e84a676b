//! A server of several versions and its client, and clients that score without a break.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flechette::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use flechette::server::proto::ctr_client::CtrClient;
use flechette::server::proto::{PredictRequest, SetLabelRequest};
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::Channel;

use super::world::{MODEL, World};
use crate::program::{Served, run};
use crate::serving::channel;
use crate::switching::answer;

/// A server and a client of it.
pub(super) struct Client {
    pub(super) served: Served,
    pub(super) runtime: Runtime,
    pub(super) ctr: CtrClient<Channel>,
    pub(super) kserve: GrpcInferenceServiceClient<Channel>,
}

impl Client {
    pub(super) fn of(served: Served) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let channel = runtime.block_on(channel(served.grpc));
        let (ctr, kserve) = (CtrClient::new(channel.clone()), GrpcInferenceServiceClient::new(channel));
        Self { served, runtime, ctr, kserve }
    }

    pub(super) fn predict(&self, request: PredictRequest) -> Result<(u64, Vec<f32>), Status> {
        let mut ctr = self.ctr.clone();
        let answer = self.runtime.block_on(ctr.predict(request))?.into_inner();
        Ok((answer.version, answer.scores))
    }

    /// The version that scores a request, which must have the scores that it has alone.
    pub(super) fn scored_by(
        &self,
        world: &World,
        change: impl FnOnce(&mut PredictRequest),
    ) -> Result<u64, Status> {
        let mut request = world.requests[0].clone();
        change(&mut request);
        let (version, scores) = self.predict(request)?;
        assert_eq!(world.version_of(0, &scores), version);
        Ok(version)
    }

    pub(super) fn by_label(&self, world: &World, label: &str) -> Result<u64, Status> {
        self.scored_by(world, |request| request.label = label.to_owned())
    }

    pub(super) fn set_label(&self, label: &str, version: u64) -> Result<u64, Status> {
        let (model, label) = (MODEL.to_owned(), label.to_owned());
        self.change(SetLabelRequest { model, label, version, remove: false })
    }

    pub(super) fn remove_label(&self, label: &str) -> Result<u64, Status> {
        let (model, label) = (MODEL.to_owned(), label.to_owned());
        self.change(SetLabelRequest { model, label, version: 0, remove: true })
    }

    pub(super) fn change(&self, request: SetLabelRequest) -> Result<u64, Status> {
        let mut ctr = self.ctr.clone();
        Ok(self.runtime.block_on(ctr.set_label(request))?.into_inner().version)
    }

    /// The output of `flechette label`.
    pub(super) fn label(&self, rest: &str) -> String {
        let output = run(&format!("label --addr {} {MODEL} {rest}", self.served.url()));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The loaded versions.
    pub(super) fn loaded(&self) -> String {
        self.label("").lines().last().unwrap().strip_prefix("loaded: ").unwrap().to_owned()
    }

    pub(super) fn metric(&self, name: &str, label: &str) -> f64 {
        self.served.metric(&format!("flechette_{name}"), &["model=\"dlrm\"", label])
    }

    pub(super) fn ends_well(self) {
        self.served.terminate();
        let (status, log) = self.served.ended();
        assert!(status.success() && !log.contains("panicked") && !log.contains("ERROR"), "{log}");
        assert!(!log.contains("not ended after"), "a change waits in vain:\n{log}");
    }
}

/// Clients score without a break until `stop` is set. Returns how many requests each version has scored. No
/// request may fail, and each must have the scores of its version.
pub(super) fn score_until(
    world: &Arc<World>,
    address: SocketAddr,
    runtime: &Runtime,
    stop: &Arc<AtomicBool>,
) -> Vec<tokio::task::JoinHandle<BTreeMap<u64, usize>>> {
    let client = |first: usize| {
        let (world, stop) = (world.clone(), stop.clone());
        runtime.spawn(async move {
            let mut client = CtrClient::new(channel(address).await);
            let mut seen = BTreeMap::new();
            for number in (0..world.requests.len()).cycle().skip(first) {
                if stop.load(Ordering::Acquire) && !seen.is_empty() {
                    break;
                }
                let mut request = world.requests[number].clone();
                // Every kind of request that names no number.
                request.label = ["", "stable", "old"][(number + first) % 3].to_owned();
                let old = request.label == "old";
                let answer = answer(&mut client, request).await;
                assert!(!old || answer.version == 2, "{}", answer.version);
                assert_eq!(world.version_of(number, &answer.scores), answer.version);
                *seen.entry(answer.version).or_default() += 1;
            }
            seen
        })
    };
    (0..4).map(client).collect()
}
