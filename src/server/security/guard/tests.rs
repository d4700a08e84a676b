use super::*;

/// The paths of all methods of a protocol.
fn methods(service: &str, proto: &str) -> Vec<String> {
    let rpcs = proto.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
    rpcs.map(|method| format!("/{service}/{method}")).collect()
}

#[test]
fn every_method_needs_the_role_that_the_docs_say() {
    let ctr = include_str!("../../../../proto/flechette/v1/ctr.proto");
    let kserve = include_str!("../../../../proto/inference/kserve.proto");
    let mut all = methods("flechette.v1.Ctr", ctr);
    all.extend(methods("inference.GRPCInferenceService", kserve));
    assert_eq!(all.len(), 16);
    let open = ["ServerLive", "ServerReady", "ModelReady"];
    let admin = ["SetLabel", "RepositoryModelLoad", "RepositoryModelUnload"];
    for path in &all {
        let method = path.rsplit('/').next().unwrap();
        let expected = match method {
            _ if open.contains(&method) => None,
            _ if admin.contains(&method) => Some(Role::Admin),
            _ => Some(Role::Predict),
        };
        assert_eq!(role(path), expected, "{path}");
        // `server.admin = off` switches off those that change something.
        let changes = Method::of(path).expect("a method of the list").kind() == Some(CallKind::Change);
        assert_eq!(changes, admin.contains(&method), "{path}");
    }
    for path in ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"] {
        assert_eq!(role(path), None, "{path}");
    }
}

#[test]
fn a_method_that_is_not_listed_needs_an_administrator() {
    for path in [
        "/flechette.v1.Ctr/Forget",
        "/inference.GRPCInferenceService/RepositoryModelReplace",
        "/inference.GRPCInferenceService/ServerLive/",
        "/inference.GRPCInferenceService//ServerLive",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.Healthy/Check",
        "flechette.v1.Ctr/Predict",
        "",
    ] {
        assert_eq!(role(path), Some(Role::Admin), "{path}");
    }
}
