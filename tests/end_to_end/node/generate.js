// A client that has nothing but the .proto files: streams one generation and prints it as JSON.
// node generate.js PROTO_DIRECTORY HOST:PORT PROMPT MAX_TOKENS
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs"); // proto-loader brings it

const [protos, address, prompt, maxTokens] = process.argv.slice(2);
const definition = loader.loadSync("draftbridge/v1/bridge.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String, // a seed has 64 bits, more than a number holds exactly
  enums: String,
  defaults: true,
  oneofs: true,
});
const { BridgeService } = grpc.loadPackageDefinition(definition).draftbridge.v1;
const client = new BridgeService(address, grpc.credentials.createInsecure());

// The detail of an error, from google/rpc/status.proto and error_details.proto, which are not among our files.
const { Status, ErrorInfo } = protobuf.parse(
  `syntax = "proto3";
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Any { string type_url = 1; bytes value = 2; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }`,
  { keepCase: true },
).root;

function infoOf(error) {
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  const details = bytes ? Status.decode(bytes).details : []; // gRPC's own errors have none
  const info = details.find(({ type_url }) => type_url.endsWith("/google.rpc.ErrorInfo"));
  return info && ErrorInfo.decode(info.value);
}

const result = { text: "", token_ids: [], deltas: 0 };
const call = client.Generate({ prompt, max_tokens: Number(maxTokens) });
call.on("data", ({ event, started, delta, finished }) => {
  if (event === "started") result.started = started;
  if (event === "finished") result.finished = finished;
  if (event === "delta") {
    result.deltas += 1;
    result.text += delta.text;
    result.token_ids.push(...delta.token_ids);
  }
});
call.on("error", (error) => {
  const { reason, metadata } = infoOf(error) ?? {};
  console.log(JSON.stringify({ code: error.code, message: error.details, reason, metadata }));
  process.exitCode = 1;
});
call.on("status", ({ code }) => {
  if (code === grpc.status.OK) console.log(JSON.stringify(result));
});
