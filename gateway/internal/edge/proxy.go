package edge

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Register has a server pass the calls of a service on to a connection. Streams end when closing is closed, except those that end by
// themselves, which the server may wait for.
func Register(s grpc.ServiceRegistrar, service protoreflect.ServiceDescriptor, to grpc.ClientConnInterface, closing <-chan struct{}) {
	desc := grpc.ServiceDesc{ServiceName: string(service.FullName()), HandlerType: (*any)(nil), Metadata: service.ParentFile().Path()}
	for i := range service.Methods().Len() {
		m := &method{
			full: "/" + desc.ServiceName + "/" + string(service.Methods().Get(i).Name()), to: to, closing: closing,
			in: typeOf(service.Methods().Get(i).Input()), out: typeOf(service.Methods().Get(i).Output()),
		}
		d := service.Methods().Get(i)
		if !d.IsStreamingClient() && !d.IsStreamingServer() {
			desc.Methods = append(desc.Methods, grpc.MethodDesc{MethodName: string(d.Name()), Handler: m.unary})
			continue
		}
		if transfers(m.full) {
			m.closing = nil
		}
		m.stream = grpc.StreamDesc{StreamName: string(d.Name()), ClientStreams: d.IsStreamingClient(), ServerStreams: d.IsStreamingServer()}
		served := m.stream
		served.Handler = m.serve
		desc.Streams = append(desc.Streams, served)
	}
	s.RegisterService(&desc, struct{}{})
}

// typeOf returns a generated type.
func typeOf(d protoreflect.MessageDescriptor) protoreflect.MessageType {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic(err) // the services' own packages register their messages
	}
	return t
}

// method passes the calls of one method on.
type method struct {
	full    string
	in, out protoreflect.MessageType
	stream  grpc.StreamDesc
	to      grpc.ClientConnInterface
	closing <-chan struct{}
}

func (m *method) unary(_ any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) { //nolint:revive // the type of grpc.MethodDesc
	in := m.in.New().Interface()
	if err := decode(in); err != nil {
		return nil, err
	}
	handle := func(ctx context.Context, in any) (any, error) {
		out := m.out.New().Interface()
		if err := m.to.Invoke(ctx, m.full, in, out); err != nil {
			return nil, rpc.FromStatus(err)
		}
		return out, nil
	}
	if intercept == nil {
		return handle(ctx, in)
	}
	return intercept(ctx, in, &grpc.UnaryServerInfo{FullMethod: m.full}, handle)
}

// serve passes a stream on, in both directions, until both sides have ended it.
func (m *method) serve(_ any, from grpc.ServerStream) error {
	ctx, cancel := context.WithCancelCause(from.Context())
	defer cancel(nil)
	up, err := m.to.NewStream(ctx, &m.stream, m.full)
	if err != nil {
		return rpc.FromStatus(err)
	}
	closing := m.closing
	if m.full == tunnelv1.TunnelService_Tunnel_FullMethodName && rpc.PeerRole(ctx) == rpc.RoleGateway {
		closing = nil // of one HTTP request, which the REST side waits for
	}
	go func() {
		select {
		case <-closing:
			cancel(errClosing())
		case <-ctx.Done():
		}
	}()
	if m.stream.ClientStreams {
		go func() {
			if err := m.send(from, up); err != nil {
				cancel(err)
			}
		}()
	} else if err := m.sendOne(from, up); err != nil {
		return err
	}
	err = m.receive(from, up)
	if cause := context.Cause(ctx); err != nil && cause != nil && from.Context().Err() == nil {
		return cause // this process has ended it, or the client has broken it
	}
	return rpc.FromStatus(err)
}

// sendOne passes the only request on.
func (m *method) sendOne(from grpc.ServerStream, up grpc.ClientStream) error {
	in := m.in.New().Interface()
	if err := from.RecvMsg(in); err != nil {
		return err
	}
	if err := up.SendMsg(in); err != nil && !errors.Is(err, io.EOF) { // the end of the call has the reason
		return rpc.FromStatus(err)
	}
	return up.CloseSend()
}

// send passes requests on until the client has sent all. The first one is decoded, because it says where the stream goes.
func (m *method) send(from grpc.ServerStream, up grpc.ClientStream) error {
	var in any = m.in.New().Interface()
	for ; ; in = new(rpc.Frame) {
		switch err := from.RecvMsg(in); {
		case errors.Is(err, io.EOF):
			return up.CloseSend()
		case err != nil:
			return err
		}
		switch err := up.SendMsg(in); {
		case errors.Is(err, io.EOF):
			return nil // the end of the call has the reason
		case err != nil:
			return rpc.FromStatus(err)
		}
	}
}

// receive passes answers on until the server has sent all. It sends headers as soon as the server does: that may have no message for long.
func (m *method) receive(from grpc.ServerStream, up grpc.ClientStream) error {
	if m.stream.ServerStreams {
		if header, err := up.Header(); err == nil && header != nil {
			if err := from.SendHeader(metadata.MD{}); err != nil {
				return err
			}
		}
	}
	for {
		out := &rpc.Frame{}
		switch err := up.RecvMsg(out); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := from.SendMsg(out); err != nil {
			return err
		}
		if !m.stream.ServerStreams {
			return nil
		}
	}
}
