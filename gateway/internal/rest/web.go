package rest

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/cors"
	"connectrpc.com/vanguard"
	"github.com/containerd/errdefs"
	rscors "github.com/rs/cors"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// maxWebMessage is the largest message in JSON or of a Connect call. The gRPC server has its own limit for what it is then.
	maxWebMessage = 16 << 20
	// corsMaxAge is for how long a browser remembers what a page may do.
	corsMaxAge = 2 * time.Hour
)

// web serves the gRPC services as Connect and gRPC-Web, which vanguard translates. The gRPC server decides about each call as about those on its
// own address: credentials are passed on to it unchanged.
type web struct {
	api      *api
	services map[string]protoreflect.ServiceDescriptor // by the path that they begin with
	handler  http.Handler
}

// web registers the gRPC services.
func (a *api) web(root *http.ServeMux, origin *http.CrossOriginProtection) error {
	if a.config.RPC == nil {
		return nil
	}
	h := &web{api: a, services: map[string]protoreflect.ServiceDescriptor{}}
	var all []*vanguard.Service
	for _, name := range a.config.RPC.Services() {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			return fmt.Errorf("finding the service %s: %w", name, err)
		}
		service, ok := d.(protoreflect.ServiceDescriptor)
		if !ok {
			return fmt.Errorf("finding the service %s: it is a %T", name, d)
		}
		h.services[name] = service
		all = append(all, vanguard.NewServiceWithSchema(service, a.config.RPC,
			vanguard.WithTargetProtocols(vanguard.ProtocolGRPC), vanguard.WithTargetCodecs(vanguard.CodecProto),
			vanguard.WithNoTargetCompression(), vanguard.WithMaxMessageBufferBytes(maxWebMessage)))
		root.Handle("/"+name+"/", origin.Handler(h))
	}
	// As REST, it refuses unknown fields: a misspelled one must not be ignored.
	transcoder, err := vanguard.NewTranscoder(all, vanguard.WithCodec(func(res vanguard.TypeResolver) vanguard.Codec {
		return jsonCodec{vanguard.JSONCodec{MarshalOptions: protojson.MarshalOptions{Resolver: res}, UnmarshalOptions: protojson.UnmarshalOptions{Resolver: res}}}
	}))
	if err != nil {
		return fmt.Errorf("creating the transcoder: %w", err)
	}
	h.handler = transcoder
	return nil
}

// jsonCodec is vanguard's, with the errors of the API.
type jsonCodec struct{ vanguard.JSONCodec }

// Unmarshal implements vanguard.Codec.
func (c jsonCodec) Unmarshal(raw []byte, m proto.Message) error {
	err := c.JSONCodec.Unmarshal(raw, m)
	if err == nil {
		return nil
	}
	st := convert(invalid(err.Error()))
	out := connect.NewError(connect.CodeInvalidArgument, errors.New(st.Message()))
	for _, d := range st.Details() {
		if m, ok := d.(proto.Message); ok {
			if detail, err := connect.NewErrorDetail(m); err == nil {
				out.AddDetail(detail)
			}
		}
	}
	return out
}

// ServeHTTP implements http.Handler. It refuses a caller without any proof of who it is before its message is read, as the gRPC server does.
func (h *web) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := h.api
	a.withoutDeadlines(w)
	service, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	method := h.services[service].Methods().ByName(protoreflect.Name(name))
	if method == nil {
		a.writeStatus(r.Context(), w, ownStatus(codes.NotFound, "no such path: "+r.URL.Path), http.StatusNotFound)
		return
	}
	e := exchangeOf(r.Context())
	e.route, e.binding = r.URL.Path, &route{method: method, upstream: upstream{name: sandboxesName}}
	trace.SpanFromContext(r.Context()).SetName(r.Method + " " + e.route)
	if a.config.Tokens != nil && len(r.Header.Values("Authorization")) == 0 && (r.TLS == nil || len(r.TLS.VerifiedChains) == 0) {
		a.refuseCaller(w, r, fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, "a bearer token or a client certificate is required"))
		return
	}
	control := http.NewResponseController(w)
	if !strings.Contains(r.Header.Get("Content-Type"), "grpc") && !strings.Contains(r.Header.Get("Content-Type"), "connect") {
		r.Body = &pacedBody{r.Body, control, a}       // of a unary call; that of a stream may have no message for long
		r.Header.Set("Connect-Protocol-Version", "1") // curl does not send it, and vanguard takes the call for REST without
	}
	h.handler.ServeHTTP(&pacedWriter{w, control, a}, r)
}

// pacedBody is a body whose sender has a minute for each piece.
type pacedBody struct {
	io.ReadCloser
	control *http.ResponseController
	api     *api
}

// Read implements io.Reader.
func (b *pacedBody) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(b.api.config.Clock.Now().Add(pieceTimeout))
	n, err := b.ReadCloser.Read(p)
	_ = b.control.SetReadDeadline(time.Time{})
	return n, err
}

// pacedWriter is an answer whose receiver has a minute for each piece.
type pacedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	api     *api
}

// Write implements io.Writer.
func (w *pacedWriter) Write(p []byte) (int, error) {
	_ = w.control.SetWriteDeadline(w.api.config.Clock.Now().Add(streamWriteTimeout))
	n, err := w.ResponseWriter.Write(p)
	_ = w.control.SetWriteDeadline(time.Time{})
	return n, err
}

// Flush implements http.Flusher.
func (w *pacedWriter) Flush() {
	_ = w.control.SetWriteDeadline(w.api.config.Clock.Now().Add(streamWriteTimeout))
	_ = w.control.Flush()
	_ = w.control.SetWriteDeadline(time.Time{})
}

// Unwrap lets http.ResponseController reach the connection.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// cors lets the pages of allowed sites call and read the answers, with tokens: certificates are the browser's, and not theirs to use.
func (a *api) cors(next http.Handler) http.Handler {
	if len(a.config.Origins) == 0 {
		return next
	}
	return rscors.New(rscors.Options{
		AllowedOrigins: a.config.Origins,
		AllowedMethods: []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete},
		AllowedHeaders: append(cors.AllowedHeaders(), "Authorization", requestIDHeader, idempotencyHeader, "Traceparent", "Range", "If-Range", "If-Match", "If-None-Match"),
		ExposedHeaders: append(cors.ExposedHeaders(), requestIDHeader, "ETag", "Content-Range", "Content-Disposition", "Retry-After"),
		MaxAge:         int(corsMaxAge.Seconds()),
	}).Handler(next)
}
