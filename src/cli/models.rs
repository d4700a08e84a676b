//! `flechette models`: lists the models of a server, or loads or unloads one.
//!
//! These are calls of the KServe service, so other clients of that protocol can make the same changes.

use serde_json::{Value, json};

use crate::cli::client::{ANSWER_BYTES, CHANGE_TIMEOUT, Connect, DESCRIBE_TIMEOUT, call, whole};
use crate::cli::print;
use crate::cli::runtime::on_this_thread;
use crate::server::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use crate::server::inference::repository_index_response::ModelIndex;
use crate::server::inference::{
    RepositoryIndexRequest, RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
};

/// Flags of `models`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    server: Connect,
    /// Serves a model of the server's directory; if it is served already, takes over its new versions
    #[arg(long, value_name = "MODEL", conflicts_with = "unload")]
    load: Option<String>,
    /// Ends serving a model; it stays in the directory
    #[arg(long, value_name = "MODEL")]
    unload: Option<String>,
    /// Prints one line of JSON: the models, or the one that was loaded or unloaded
    #[arg(long)]
    json: bool,
}

/// Lists the models, or changes one.
///
/// # Errors
/// When the server cannot be reached, or refuses the change.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    print(&on_this_thread(ask(args))??)
}

async fn ask(args: Args) -> anyhow::Result<String> {
    let Args { server, load, unload, json } = args;
    let token = server.token()?;
    let client = GrpcInferenceServiceClient::new(server.channel().await?);
    let mut client = client.max_decoding_message_size(ANSWER_BYTES);
    let failed = |status| server.failed_call(status);
    let token = token.as_ref();
    let changed = match (load, unload) {
        (Some(model_name), _) => {
            let message = RepositoryModelLoadRequest { model_name: model_name.clone(), ..Default::default() };
            let answer = client.repository_model_load(call(message, CHANGE_TIMEOUT, token));
            whole(CHANGE_TIMEOUT, answer).await.map_err(failed)?;
            ("loaded", model_name)
        }
        (_, Some(model_name)) => {
            let message =
                RepositoryModelUnloadRequest { model_name: model_name.clone(), ..Default::default() };
            let answer = client.repository_model_unload(call(message, CHANGE_TIMEOUT, token));
            whole(CHANGE_TIMEOUT, answer).await.map_err(failed)?;
            ("unloaded", model_name)
        }
        _ => {
            let request = call(RepositoryIndexRequest::default(), DESCRIBE_TIMEOUT, token);
            let answer = whole(DESCRIBE_TIMEOUT, client.repository_index(request)).await;
            let models = answer.map_err(failed)?.into_inner().models;
            return Ok(if json { listed_json(&models) } else { listed(&models) });
        }
    };
    // A token for changes may not be one for the list.
    let (word, model) = changed;
    Ok(if json { format!("{}\n", json!({word: model})) } else { format!("{model}: {word}\n") })
}

/// The versions, one a line, under a header.
fn listed(models: &[ModelIndex]) -> String {
    let width = models.iter().map(|model| model.name.chars().count()).fold(5, usize::max);
    let line = |ModelIndex { name, version, state, reason }: &ModelIndex| {
        let version = if version.is_empty() { "-" } else { version };
        format!("{name:width$} {version:>8}  {state:11}  {reason}").trim_end().to_owned() + "\n"
    };
    let header = format!("{:width$} {:>8}  {:11}  {}\n", "MODEL", "VERSION", "STATE", "REASON");
    header + &models.iter().map(line).collect::<String>()
}

fn listed_json(models: &[ModelIndex]) -> String {
    let one = |ModelIndex { name, version, state, reason }: &ModelIndex| {
        let reason = Some(reason).filter(|reason| !reason.is_empty());
        json!({"name": name, "version": version.parse::<u64>().ok(), "state": state, "reason": reason})
    };
    format!("{}\n", json!({"models": models.iter().map(one).collect::<Vec<Value>>()}))
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_not_served_has_no_version_and_a_reason() {
        let row = |version: &str, state: &str, reason: &str| ModelIndex {
            name: "ctr_of_feeds".to_owned(),
            version: version.to_owned(),
            state: state.to_owned(),
            reason: reason.to_owned(),
        };
        let models = [row("7", "READY", ""), row("", "UNAVAILABLE", "not loaded")];
        assert_eq!(
            listed(&models),
            "MODEL         VERSION  STATE        REASON\n\
             ctr_of_feeds        7  READY\n\
             ctr_of_feeds        -  UNAVAILABLE  not loaded\n"
        );
        assert_eq!(
            listed_json(&models),
            "{\"models\":[{\"name\":\"ctr_of_feeds\",\"reason\":null,\"state\":\"READY\",\"version\":7},\
             {\"name\":\"ctr_of_feeds\",\"reason\":\"not loaded\",\"state\":\"UNAVAILABLE\",\
             \"version\":null}]}\n"
        );
    }
}
