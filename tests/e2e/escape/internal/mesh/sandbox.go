package mesh

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// Create creates a sandbox. Without a pool it is in the tenant's.
func (t *Tenant) Create(ctx context.Context, name string, spec *sandboxv1.SandboxSpec) (*sandboxv1.CreateSandboxResponse, error) {
	spec = proto.CloneOf(spec)
	if spec.GetPool() == "" {
		spec.Pool = t.Pool
	}
	if spec.GetTerminationGracePeriod() == nil {
		spec.TerminationGracePeriod = durationpb.New(time.Second)
	}
	return t.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Namespace: t.Namespace, Name: name, RequestId: uuid.NewString(), Spec: spec})
}

// Delete deletes a sandbox, if there is one.
func (t *Tenant) Delete(ctx context.Context, name string) error {
	_, err := t.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: t.Namespace, Name: name, GracePeriod: durationpb.New(0)})
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// Get returns a sandbox.
func (t *Tenant) Get(ctx context.Context, name string) (*sandboxv1.Sandbox, error) {
	resp, err := t.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: t.Namespace, Name: name})
	return resp.GetSandbox(), err
}

// Output calls line with each line of a sandbox's output, until its process has ended.
func (t *Tenant) Output(ctx context.Context, name string, line func([]byte)) error {
	stream, err := t.Sandboxes.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: t.Namespace, Name: name, Follow: true})
	if err != nil {
		return fmt.Errorf("reading the output of %s: %w", name, err)
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(copyStream(w, stream)) }()
	defer func() { _ = r.Close() }()
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		line(scanner.Bytes())
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("reading the output of %s: %w", name, err)
	}
	return nil
}

func copyStream(w io.Writer, stream grpc.ServerStreamingClient[sandboxv1.StreamLogsResponse]) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(m.GetData()); err != nil {
			return err
		}
	}
}

// Typed reports whether an error of the API is one that its callers can handle: with a reason, and not that of a defect. gRPC itself refuses
// what is far too large, before any code of ours sees it.
func Typed(err error) bool {
	switch status.Code(err) {
	case codes.ResourceExhausted:
		return true
	case codes.OK, codes.Internal, codes.Unknown:
		return false
	}
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason() != ""
		}
	}
	return false
}
