package caller

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// maxGrowth is how much memory a server may have taken after a malformed request: far less than a hundred of the largest.
const maxGrowth = 128 << 20

// repeated is how often each malformed request is sent.
const repeated = 20

// untyped is why a malformed request is a success: the server has taken damage from it.
const untyped = "the request is accepted, the error is not one that callers can handle, the server does not answer afterwards, or it has taken more than 128 MiB"

// raw is a codec that sends bytes as they are.
type raw struct{}

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (raw) Name() string { return "proto" }

func malformed() []attempt {
	bomb := sync.OnceValue(gzipBomb)
	nested := strings.Repeat("{\"spec\":", 20_000)
	var out []attempt
	for name, message := range map[string][]byte{
		"random bytes":             random(4096),
		"a length beyond the end":  {0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f, 'x'},
		"a field number of zero":   {0x00, 0x01},
		"an endless varint":        bytes.Repeat([]byte{0xff}, 64),
		"a name that is not UTF-8": append([]byte{0x0a, 3}, 0xff, 0xfe, 0xfd),
		"nested groups":            bytes.Repeat([]byte{0x0b}, 100_000),
		"nested messages":          nestedMessages(12),
		"a large message":          append([]byte{0x12, 0x80, 0x80, 0x80, 0x10}, make([]byte, 32<<20)...),
		"a million labels":         bytes.Repeat([]byte{0x22, 0x04, 0x0a, 0x00, 0x12, 0x00}, 500_000),
	} {
		out = append(out, attempt{name: "protobuf: " + name, does: "sends it to methods of the allocator", success: untyped,
			run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
				return survives(ctx, s, "/allocator", func() (string, error) { return sendRaw(ctx, s, message) })
			}})
	}
	for name, r := range map[string]struct {
		request
		body    func() io.Reader
		headers []string
	}{
		"JSON: nested":          {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text(nested)},
		"JSON: arrays":          {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text(`{"spec":` + strings.Repeat("[", 500_000))},
		"JSON: wrong types":     {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text(`{"spec":{"image":7,"command":"x","env":[1],"ports":["a"]},"labels":3}`)},
		"JSON: a large number":  {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text(`{"spec":{"image":"x","ports":[1e400]}}`)},
		"JSON: not UTF-8":       {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text("{\"name\":\"\xff\xfe\"}")},
		"JSON: cut off":         {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: text(`{"spec":{"image":"`)},
		"JSON: a large body":    {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: func() io.Reader { return io.LimitReader(endless{}, 64<<20) }},
		"JSON: compressed":      {request: request{method: "POST", path: "/v1/namespaces/OWN/sandboxes"}, body: func() io.Reader { return bytes.NewReader(bomb()) }, headers: []string{"Content-Encoding", "gzip"}},
		"query: unknown field":  {request: request{method: "GET", path: "/v1/namespaces/OWN/sandboxes?spec.secret=1"}, body: text("")},
		"query: a large number": {request: request{method: "GET", path: "/v1/namespaces/OWN/sandboxes?pageSize=99999999999999999999"}, body: text("")},
		"query: a selector":     {request: request{method: "GET", path: "/v1/namespaces/OWN/sandboxes?labelSelector=" + strings.Repeat("(", 4000)}, body: text("")},
		"query: a page token":   {request: request{method: "GET", path: "/v1/namespaces/OWN/sandboxes?pageToken=AAAA"}, body: text("")},
		"query: a mask":         {request: request{method: "PATCH", path: "/v1/namespaces/OWN/sandboxes/x?updateMask=" + strings.Repeat("a.", 4000)}, body: text("{}")},
		"path: a long name":     {request: request{method: "GET", path: "/v1/namespaces/OWN/sandboxes/" + strings.Repeat("a", 8000)}, body: text("")},
	} {
		out = append(out, attempt{name: name, does: "sends it to the gateway", success: untyped,
			run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
				f := r.fill(s)
				return survives(ctx, s, "/gateway", func() (string, error) {
					a, err := c.send(ctx, s.Hostile.Token, f.method, f.path, r.body(), r.headers...)
					return a.typed(err)
				})
			}})
	}
	return append(out, attempt{name: "metadata of a megabyte", does: "sends it to the allocator", success: untyped,
		run: func(ctx context.Context, s *mesh.Scene, _ *gateway) (string, error) {
			large := metadata.AppendToOutgoingContext(ctx, "x-large", strings.Repeat("x", 1<<20))
			return survives(ctx, s, "/allocator", func() (string, error) {
				_, err := s.Hostile.Sandboxes.ListSandboxes(large, &sandboxv1.ListSandboxesRequest{Namespace: s.Hostile.Namespace})
				if err == nil {
					return "it is accepted", nil
				}
				return "", err
			})
		}})
}

func text(t string) func() io.Reader { return func() io.Reader { return strings.NewReader(t) } }

type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// bombBytes is the size of a gzip bomb once it is unpacked: more than a server may take.
const bombBytes = 2 * maxGrowth

func gzipBomb() []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, _ = io.Copy(w, io.LimitReader(endless{}, bombBytes))
	_ = w.Close()
	return buf.Bytes()
}

func random(n int) []byte {
	out := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(out)
	return out
}

// nestedMessages returns a message whose field 3 has itself again, in powers of two.
func nestedMessages(times int) []byte {
	out := []byte{}
	for range 1 << times {
		length := []byte{}
		for n := len(out); ; n >>= 7 {
			if n < 0x80 {
				length = append(length, byte(n))
				break
			}
			length = append(length, byte(n)|0x80)
		}
		out = append(append([]byte{0x1a}, length...), out...)
	}
	return out
}

// sendRaw sends the bytes to methods of the allocator.
func sendRaw(ctx context.Context, s *mesh.Scene, message []byte) (string, error) {
	var refused error
	for _, method := range []string{sandboxv1.SandboxService_CreateSandbox_FullMethodName, sandboxv1.SandboxService_ListSandboxes_FullMethodName, sandboxv1.SandboxService_UpdateSandbox_FullMethodName} {
		var out []byte
		err := s.Hostile.Conn.Invoke(ctx, method, message, &out, grpc.ForceCodecV2(raw{}))
		switch code := status.Code(err); {
		case code == codes.OK && method != sandboxv1.SandboxService_ListSandboxes_FullMethodName:
			return method + " has accepted it", nil
		case code == codes.Unknown, code == codes.Unavailable, code == codes.DeadlineExceeded:
			return fmt.Sprintf("%s: %v", method, err), nil
		case code == codes.Internal && !strings.Contains(err.Error(), "unmarshal"):
			return fmt.Sprintf("%s: %v", method, err), nil // gRPC itself says so of what it cannot decode
		}
		refused = err
	}
	return "", refused
}

// typed returns evidence unless an answer is an error of the client's, as google.rpc.Status. A gateway that ends a connection whose
// request is too large refuses it, too.
func (a answer) typed(err error) (string, error) {
	switch {
	case err != nil && a.code == 0:
		return "", err
	case a.code >= 400 && a.code < 500:
		if a.code != http.StatusRequestHeaderFieldsTooLarge && !strings.Contains(a.body, `"code"`) {
			return fmt.Sprintf("the answer is %d: %.160s", a.code, a.body), nil
		}
		return "", fmt.Errorf("%d: %.160s", a.code, a.body)
	}
	return fmt.Sprintf("the answer is %d: %.160s", a.code, a.body), nil
}

// survives sends something several times, and looks whether the server answers then, and how much memory it has.
func survives(ctx context.Context, s *mesh.Scene, program string, send func() (string, error)) (string, error) {
	before := mesh.Resident(program)
	var refused error
	for range repeated {
		var evidence string
		if evidence, refused = send(); evidence != "" {
			return evidence, nil
		}
	}
	if _, err := s.Victim.Get(ctx, s.Target.Name); err != nil {
		return "the server does not answer: " + err.Error(), nil //nolint:nilerr // that is the evidence
	}
	after := mesh.Resident(program)
	switch {
	case before == 0 || after == 0:
		return "", suite.Brokenf("no process executes %s", program)
	case after-before > maxGrowth:
		return fmt.Sprintf("the server has taken %d MiB", (after-before)>>20), nil
	case refused == nil:
		refused = errors.New("the server is as it was")
	}
	return "", refused
}
