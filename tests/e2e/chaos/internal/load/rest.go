package load

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// maxBody bounds the size of an answer.
const maxBody = 4 << 20

// REST is a client of the gateway's REST API with the interface of the gRPC client, for creates, updates and deletes. Errors
// are gRPC statuses: those of the server from its JSON, and Unavailable for everything below that.
type REST struct {
	sandboxv1.SandboxServiceClient
	// Client has the client certificate; URL is the address of the gateway.
	Client *http.Client
	URL    string
}

// CreateSandbox implements sandboxv1.SandboxServiceClient.
func (r *REST) CreateSandbox(ctx context.Context, in *sandboxv1.CreateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.CreateSandboxResponse, error) {
	out := &sandboxv1.CreateSandboxResponse{}
	return out, r.call(ctx, http.MethodPost, sandboxes(in.GetNamespace()), nil, in, out)
}

// UpdateSandbox implements sandboxv1.SandboxServiceClient.
func (r *REST) UpdateSandbox(ctx context.Context, in *sandboxv1.UpdateSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.UpdateSandboxResponse, error) {
	out := &sandboxv1.UpdateSandboxResponse{}
	query := url.Values{"updateMask": {strings.Join(in.GetUpdateMask().GetPaths(), ",")}, "requestId": {in.GetRequestId()}}
	path := sandboxes(in.GetSandbox().GetNamespace()) + "/" + in.GetSandbox().GetName()
	return out, r.call(ctx, http.MethodPatch, path, query, in.GetSandbox(), out)
}

// DeleteSandbox implements sandboxv1.SandboxServiceClient.
func (r *REST) DeleteSandbox(ctx context.Context, in *sandboxv1.DeleteSandboxRequest, _ ...grpc.CallOption) (*sandboxv1.DeleteSandboxResponse, error) {
	out := &sandboxv1.DeleteSandboxResponse{}
	query := url.Values{"uid": {in.GetUid()}, "requestId": {in.GetRequestId()}}
	return out, r.call(ctx, http.MethodDelete, sandboxes(in.GetNamespace())+"/"+in.GetName(), query, nil, out)
}

func sandboxes(namespace string) string { return "/v1/namespaces/" + namespace + "/sandboxes" }

func (r *REST) call(ctx context.Context, method, path string, query url.Values, in, out proto.Message) error {
	var body io.Reader
	if in != nil {
		raw, err := protojson.Marshal(in)
		if err != nil {
			return fmt.Errorf("encoding a request: %w", err)
		}
		body = bytes.NewReader(raw)
	}
	target := r.URL + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return fmt.Errorf("making a request: %w", err)
	}
	resp, err := r.Client.Do(req)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	if resp.StatusCode != http.StatusOK {
		return failure(resp.Status, raw)
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, out); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// failure returns the server's status, or Unavailable for an answer that has none.
func failure(line string, raw []byte) error {
	var st statuspb.Status
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, &st); err != nil || st.GetCode() == 0 {
		return status.Error(codes.Unavailable, line)
	}
	return status.FromProto(&st).Err()
}
